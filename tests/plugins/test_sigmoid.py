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


def scores(scale: float = 2.0) -> Tensor:
    return scale * torch.randn(8, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def table(loss: type, logits: Tensor) -> Tensor:
    rows = [[formula(row, c, POWER[loss]) for c in range(N)] for row in logits.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scale", [0.0, 2.0, 30.0])
def test_every_path_is_the_formula(loss, scale):
    logits, q = scores(scale), scores().softmax(-1)
    wanted = table(loss, logits)
    torch.testing.assert_close(loss().per_class(logits), wanted, rtol=1e-12, atol=1e-15)
    for y in range(N):
        got = loss(reduction="none")(logits, torch.full((8,), y))
        torch.testing.assert_close(got, wanted[:, y], rtol=1e-12, atol=0)
    torch.testing.assert_close(loss(reduction="none")(logits, q), (q * wanted).sum(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_class_weights_scale_the_table(loss):
    logits, weight = scores(), torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 1.5])
    wanted, labels, q = table(loss, logits), torch.arange(8) % N, scores(1.0).softmax(-1)
    indexed = wanted.gather(1, labels[:, None])[:, 0] * weight[labels]
    torch.testing.assert_close(loss(weight=weight)(logits, labels), indexed.sum() / weight[labels].sum().double())
    torch.testing.assert_close(loss(weight=weight)(logits, q), (q * weight * wanted).sum() / 8)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_finite_differences(loss):
    logits = scores().requires_grad_()
    for target in (torch.arange(8) % N, scores(1.0).softmax(-1)):
        assert torch.autograd.gradcheck(lambda s, q=target: loss(label_smoothing=0.1)(s, q), logits)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_well_classified_row_keeps_its_digits_in_float32(loss):
    """At a margin of 20 the label's part is sigmoid(-20) = 2e-9, where 1 - sigmoid(20) is 0 in float32."""
    logits = torch.full((1, N), -20.0).index_fill(1, torch.tensor([2]), 20.0)
    wanted = table(loss, logits.double())[:, 2].mean().float()
    torch.testing.assert_close(loss()(logits, torch.tensor([2])), wanted, rtol=1e-6, atol=0)
    # in the table the other classes' part is a difference of sums
    torch.testing.assert_close(loss()(logits, torch.eye(N)[[2]]), wanted, rtol=0, atol=2.0**-23)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_on_the_rounded_scores(loss, dtype):
    logits, labels = scores().to(dtype), torch.arange(8) % N
    torch.testing.assert_close(loss()(logits, labels), loss()(logits.float(), labels), rtol=0, atol=0)
