"""Every loss has a plain formula, with which tests/losses/test_properties.py and benchmarks/fuzz.py compare it."""

from benchmarks.fuzz import Case
from tests.formulas import LOSSES
from tests.plugins.test_contract import NAMES

OF_BATCHES = {"conformal_training", "conformal_training_low_variance"}  # test_conformal.py


def test_every_loss_has_a_formula():
    assert set(LOSSES) | OF_BATCHES == set(NAMES)


def test_a_wrong_loss_is_found(monkeypatch):
    case = Case("0", "sigmoid_mse")
    monkeypatch.setitem(LOSSES, "sigmoid_mse", LOSSES["sigmoid_mae"])
    assert case.problem()
