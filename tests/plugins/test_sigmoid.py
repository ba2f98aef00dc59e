"""Sigmoid errors against their formula, summed in Python."""

import math

import pytest
import torch
from torch import Tensor

from topk_plugins.sigmoid import SigmoidMAE, SigmoidMSE

POWER = {SigmoidMSE: 2, SigmoidMAE: 1}
LOSSES = list(POWER)
N = 6


def sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s))


def formula(s: list[float], y: int, a: int) -> float:
    """Where the label's p is near 1, 1 - p is sigmoid(-s): the subtraction would leave no digit."""
    return sum(sigmoid(-score if c == y else score) ** a for c, score in enumerate(s)) / len(s)


def table(loss: type, logits: Tensor) -> Tensor:
    rows = [[formula(row, c, POWER[loss]) for c in range(N)] for row in logits.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_well_classified_row_keeps_its_digits_in_float32(loss):
    """At a margin of 20 the label's part is sigmoid(-20) = 2e-9, where 1 - sigmoid(20) is 0 in float32."""
    logits = torch.full((1, N), -20.0).index_fill(1, torch.tensor([2]), 20.0)
    wanted = table(loss, logits.double())[:, 2].mean().float()
    torch.testing.assert_close(loss()(logits, torch.tensor([2])), wanted, rtol=1e-6, atol=0)
    # in the table the other classes' part is a difference of sums
    torch.testing.assert_close(loss()(logits, torch.eye(N)[[2]]), wanted, rtol=0, atol=2.0**-23)
