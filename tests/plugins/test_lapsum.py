"""LapSum's soft top-k: against its definition by bisection, its Jacobian, real k, limits and gaps between scores."""

import mpmath
import pytest
import torch
from torch.nn import functional as F

from topk_plugins.soft_topk import LapSum
from topk_registry import create_loss

N = 9


def scores(rows: int = 6, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def laplace(u: mpmath.mpf) -> mpmath.mpf:
    return mpmath.exp(u) / 2 if u <= 0 else 1 - mpmath.exp(-u) / 2


def by_bisection(row: list[float], k: float, tau: float) -> list[mpmath.mpf]:
    """The weights p by the definition, in 50 digits."""
    x = [mpmath.mpf(s) / mpmath.mpf(tau) for s in row]
    low, high = min(x) - 50, max(x) + 50
    for _ in range(220):
        b = (low + high) / 2
        low, high = (b, high) if mpmath.fsum(laplace(v - b) for v in x) > k else (low, b)
    return [laplace(v - low) for v in x]


@pytest.mark.parametrize("tau", [0.02, 0.5, 4.0])
@pytest.mark.parametrize("k", [0.3, 1, 3, 3.7, 8, 8.9])
@pytest.mark.slow
def test_is_the_definition(k, tau):
    s = scores()
    table = LapSum(k, tau=tau).per_class(s)
    with mpmath.workdps(50):
        for row, losses in zip(s.tolist(), table.tolist(), strict=True):
            for p, loss in zip(by_bisection(row, k, tau), losses, strict=True):
                # x = s / tau is rounded to doubles before all else
                rounding = 8 * 2.0**-53 * max(map(abs, row)) / tau
                wanted = float(-mpmath.log(p))
                assert loss == pytest.approx(wanted, rel=1e-12 + rounding, abs=1e-15)


@pytest.mark.parametrize("k", [1, 2.5])
def test_weights_add_up_to_k_and_do_not_depend_on_a_shift(k):
    s = scores()
    torch.testing.assert_close((-LapSum(k).per_class(s)).exp().sum(-1), torch.full((6,), float(k)).double())
    torch.testing.assert_close(LapSum(k).per_class(s + 100), LapSum(k).per_class(s))


def test_the_jacobian_is_the_papers():
    """diag(d) - d q^T, q = d / sum d."""
    s, k, tau = scores(1), 2.5, 0.7
    found = torch.autograd.functional.jacobian(lambda s: (-LapSum(k, tau=tau).per_class(s)).exp()[0], s)[:, 0]
    b = LapSum(k).threshold(s / tau)
    d = (-(s[0] / tau - b).abs()).exp() / (2 * tau)
    torch.testing.assert_close(found, torch.diag(d) - torch.outer(d, d / d.sum()))


@pytest.mark.parametrize("k", [1, 2.5, 8])
def test_derivatives(k):
    s, y = scores().requires_grad_(), torch.arange(6)
    loss = LapSum(k, tau=0.8)
    assert torch.autograd.gradcheck(lambda s: loss(s, y), s)
    assert torch.autograd.gradgradcheck(lambda s: loss(s, y), s)


def test_a_gap_wider_than_exponentials_reach():
    """With k scores far above the others, b lies half-way: the hard top-k, with exact small losses and gradients."""
    s = torch.tensor([[2000.0, 2001.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    assert LapSum(2).threshold(s).item() == pytest.approx(
        1000.0 + (mpmath.log(1 + mpmath.e**-1) - mpmath.log(1 + mpmath.e**-1)) / 2
    )
    losses = LapSum(2).per_class(s)
    assert losses[0, :2].tolist() == [0.0, 0.0]
    losses[0, 2].backward()
    # b moves with the nearest score above and the nearest below, half each but for their neighbours
    q = torch.tensor([1 / (1 + mpmath.e**-1), mpmath.e**-1 / (1 + mpmath.e**-1)], dtype=torch.float64) / 2
    torch.testing.assert_close(s.grad, torch.stack((q[0], q[1], q[0] - 1, q[1]))[None])


def test_ties_share():
    s = torch.zeros(1, 4, dtype=torch.float64)
    torch.testing.assert_close((-LapSum(3).per_class(s)).exp(), torch.full((1, 4), 0.75).double())


def test_a_class_that_is_ruled_out():
    s, y = scores(1), torch.tensor([1])
    s[0, 4] = -torch.inf
    leaf = s.clone().requires_grad_()
    loss = LapSum(3)(leaf, y)
    loss.backward()
    kept = s.isfinite()[0]
    torch.testing.assert_close(loss, LapSum(3)(s[:, kept], y))
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0, 4] == 0


def test_soft_targets_are_expectations():
    s, q = scores(), torch.softmax(scores().flip(0), -1)
    torch.testing.assert_close(create_loss("lapsum", k=2, reduction="none")(s, q), (q * LapSum(2).per_class(s)).sum(-1))
    one_hot = F.one_hot(torch.arange(6), N).double()
    torch.testing.assert_close(LapSum(2)(s, one_hot), LapSum(2)(s, torch.arange(6)))


def test_bad_options():
    for k in (0, -1.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="k must be a finite number above 0, got"):
            LapSum(k)
    with pytest.raises(ValueError, match="tau must be a finite number above 0, got 0"):
        LapSum(tau=0)
    with pytest.raises(ValueError, match="k must be below the number of classes: k = 9, logits have 9"):
        LapSum(9)(scores(), torch.arange(6))
