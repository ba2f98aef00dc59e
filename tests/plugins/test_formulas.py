"""Value and gradient of every loss by its plain formula, for random options, targets, weights, dtypes and backends."""

import pytest

from benchmarks.fuzz import Case
from tests.formulas import LOSSES
from tests.plugins.test_contract import NAMES

OF_BATCHES = {"conformal_training", "conformal_training_low_variance"}  # test_conformal.py


def test_every_loss_has_a_formula():
    assert set(LOSSES) | OF_BATCHES == set(NAMES)


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_the_formula(name):
    for number in range(8):
        case = Case(f"{name} {number}", name)
        assert not case.problem(), str(case)


def test_a_wrong_loss_is_found(monkeypatch):
    case = Case("0", "sigmoid_mse")
    monkeypatch.setitem(LOSSES, "sigmoid_mse", LOSSES["sigmoid_mae"])
    assert case.problem()
