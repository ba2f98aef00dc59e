"""SoftTop-k and LapSum: their definition in 200 digits, and gaps that exponentials do not reach."""

import mpmath
import pytest
import torch

from topk_plugins.soft_topk import LapSum, SoftTopK

N = 9


def scores(rows: int = 6, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sigmoid(u: mpmath.mpf) -> mpmath.mpf:
    return 1 / (1 + mpmath.exp(-u))


def laplace(u: mpmath.mpf) -> mpmath.mpf:
    return mpmath.exp(u) / 2 if u <= 0 else 1 - mpmath.exp(-u) / 2


LOSSES = [(SoftTopK, sigmoid), (LapSum, laplace)]
each_loss = pytest.mark.parametrize(("loss", "share"), LOSSES, ids=["soft_topk", "lapsum"])


@each_loss
@pytest.mark.parametrize(("k", "tau"), [(0.3, 0.02), (3, 0.5), (3.7, 4.0), (8.9, 0.02)])
def test_is_the_definition(loss, share, k, tau):
    s = scores(2)
    table = loss(k, tau=tau).per_class(s)
    with mpmath.workdps(200):  # across a gap of hundreds the sums differ from k in the hundredth digit
        for row, losses in zip(s.tolist(), table.tolist(), strict=True):
            x = [mpmath.mpf(score) / mpmath.mpf(tau) for score in row]
            low, high = min(x) - 50, max(x) + 50
            for _ in range(220):
                b = (low + high) / 2
                low, high = (b, high) if mpmath.fsum(share(v - b) for v in x) > k else (low, b)
            rounding = 8 * 2.0**-53 * max(map(abs, row)) / tau  # x = s / tau is rounded to doubles before all else
            for v, found in zip(x, losses, strict=True):
                assert found == pytest.approx(float(-mpmath.log(share(v - low))), rel=1e-12 + rounding, abs=1e-15)


@each_loss
def test_a_gap_wider_than_exponentials_reach(loss, share):
    """With k scores far above the others, b lies half-way: the hard top-k, with exact small losses and gradients."""
    s = torch.tensor([[2000.0, 2001.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    assert loss(2).threshold(s).item() == pytest.approx(1000.0)
    losses = loss(2).per_class(s)
    assert losses[0, :2].tolist() == [0.0, 0.0]
    losses[0, 2].backward()
    # b moves with the scores above and those below, half each, the nearest most
    near, next_ = 1 / (1 + mpmath.e**-1) / 2, mpmath.e**-1 / (1 + mpmath.e**-1) / 2
    torch.testing.assert_close(s.grad, torch.tensor([[near, next_, near - 1, next_]], dtype=torch.float64))
