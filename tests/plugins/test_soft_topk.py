"""SoftTop-k against its definition in 50 digits, the authors' algorithm written anew, its Jacobian, limits and gaps."""

import mpmath
import pytest
import torch
from torch.nn import functional as F

from topk_plugins.soft_topk import SoftTopK
from topk_registry import create_loss, use_backend

N = 9


def scores(rows: int = 6, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_bisection(row: list[float], k: float, tau: float) -> list[mpmath.mpf]:
    """log(1 + e^(b - x)) of every class, b by halving."""
    x = [mpmath.mpf(s) / mpmath.mpf(tau) for s in row]
    low, high = min(x) - 50, max(x) + 50
    for _ in range(220):
        b = (low + high) / 2
        total = mpmath.fsum(1 / (1 + mpmath.exp(b - v)) for v in x)
        low, high = (b, high) if total > k else (low, b)
    return [mpmath.log1p(mpmath.exp(low - v)) for v in x]


@pytest.mark.parametrize("tau", [0.02, 0.5, 4.0])
@pytest.mark.parametrize("k", [0.3, 1, 3, 3.7, 8, 8.9])
def test_is_the_definition(k, tau):
    s = scores(3)
    table = SoftTopK(k, tau=tau).per_class(s)
    with mpmath.workdps(200):  # across a gap of hundreds the sums differ from k in the hundredth digit
        for row, losses in zip(s.tolist(), table.tolist(), strict=True):
            for wanted, loss in zip(by_bisection(row, k, tau), losses, strict=True):
                rounding = 8 * 2.0**-53 * max(map(abs, row)) / tau  # x = s / tau is rounded to doubles before all else
                assert loss == pytest.approx(float(wanted), rel=1e-12 + rounding, abs=1e-15)


def published(s: torch.Tensor, y: torch.Tensor, k: int, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the paper: t by halving with sum sigmoid(alpha (s + t)) = k, and the vector-Jacobian product
    (I - v 1^T / sum v) of the log's own slopes."""
    low, high = -s.amax(1, keepdim=True) - 10 / alpha, -s.amin(1, keepdim=True) + 10 / alpha
    for _ in range(64):
        middle = (low + high) / 2
        short = torch.sigmoid(alpha * (s + middle)).sum(1, keepdim=True) < k
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    log_odds = alpha * (s + (low + high) / 2)
    p = log_odds.sigmoid()
    own = -F.one_hot(y, s.shape[1]) * alpha * (1 - p)
    v = p * (1 - p)
    return -F.logsigmoid(log_odds).gather(1, y[:, None])[:, 0], own - own.sum(1, keepdim=True) * v / v.sum(
        1, keepdim=True
    )


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_is_the_authors_algorithm(k, alpha):
    s, y = scores().requires_grad_(), torch.arange(6)
    loss = SoftTopK(k, tau=1 / alpha, reduction="none")(s, y)
    wanted, gradient = published(s.detach(), y, k, alpha)
    torch.testing.assert_close(loss.detach(), wanted)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), s)[0], gradient)


def test_several_labels_are_a_mean():
    """As the paper takes it over an image's labels."""
    s = scores()
    labels = torch.tensor([[0, 3, 5]]).expand(6, 3)
    wanted = sum(published(s, y, 3, 1.0)[0] for y in labels.T) / 3
    target = torch.zeros(6, N).scatter(1, labels, 1 / 3).double()
    torch.testing.assert_close(SoftTopK(3, reduction="none")(s, target), wanted)


@pytest.mark.parametrize("k", [1, 2.5])
def test_weights_add_up_to_k_and_do_not_depend_on_a_shift(k):
    s = scores()
    torch.testing.assert_close((-SoftTopK(k).per_class(s)).exp().sum(-1), torch.full((6,), float(k)).double())
    torch.testing.assert_close(SoftTopK(k).per_class(s + 100), SoftTopK(k).per_class(s))


def test_the_jacobian():
    """diag(v) - v v^T / sum v, over tau."""
    s, k, tau = scores(1), 2.5, 0.7
    found = torch.autograd.functional.jacobian(lambda s: (-SoftTopK(k, tau=tau).per_class(s)).exp()[0], s)[:, 0]
    p = torch.sigmoid(s[0] / tau - SoftTopK(k).threshold(s / tau))
    v = p * (1 - p)
    torch.testing.assert_close(found, (torch.diag(v) - torch.outer(v, v / v.sum())) / tau)


@pytest.mark.parametrize("k", [1, 2.5, 8])
def test_derivatives(k):
    s, y = scores().requires_grad_(), torch.arange(6)
    loss = SoftTopK(k, tau=0.8)
    assert torch.autograd.gradcheck(lambda s: loss(s, y), s)
    assert torch.autograd.gradgradcheck(lambda s: loss(s, y), s)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_gap_wider_than_exponentials_reach(backend):
    """With k scores far above the others, b lies half-way: the hard top-k, with exact small losses and gradients."""
    if backend == "numba":
        pytest.importorskip("numba")
    s = torch.tensor([[2000.0, 2001.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    assert SoftTopK(2).threshold(s).item() == pytest.approx(1000.0)
    loss = create_loss("soft_topk", k=2)
    with use_backend(backend):
        assert loss(s, torch.tensor([0])).item() == 0.0
        found = loss(s, torch.tensor([2]))
    found.backward()
    assert found.item() == pytest.approx(1000.0)
    # b moves with the scores above and those below, half each, the nearest most
    near, next_ = 1 / (1 + mpmath.e**-1) / 2, mpmath.e**-1 / (1 + mpmath.e**-1) / 2
    torch.testing.assert_close(s.grad, torch.tensor([[near, next_, near - 1, next_]], dtype=torch.float64))


def test_ties_share():
    s = torch.zeros(1, 4, dtype=torch.float64)
    torch.testing.assert_close((-SoftTopK(3).per_class(s)).exp(), torch.full((1, 4), 0.75).double())


def test_a_class_that_is_ruled_out():
    s, y = scores(1), torch.tensor([1])
    s[0, 4] = -torch.inf
    leaf = s.clone().requires_grad_()
    loss = SoftTopK(3)(leaf, y)
    loss.backward()
    kept = s.isfinite()[0]
    torch.testing.assert_close(loss, SoftTopK(3)(s[:, kept], y))
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0, 4] == 0


def test_soft_targets_are_expectations():
    s, q = scores(), torch.softmax(scores().flip(0), -1)
    found = create_loss("soft_topk", k=2, reduction="none")(s, q)
    torch.testing.assert_close(found, (q * SoftTopK(2).per_class(s)).sum(-1))
    one_hot = F.one_hot(torch.arange(6), N).double()
    torch.testing.assert_close(SoftTopK(2)(s, one_hot), SoftTopK(2)(s, torch.arange(6)))


def test_bad_options():
    for k in (0, -1.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="k must be a finite number above 0, got"):
            SoftTopK(k)
    with pytest.raises(ValueError, match="tau must be a finite number above 0, got 0"):
        SoftTopK(tau=0)
    with pytest.raises(ValueError, match="k must be below the number of classes: k = 9, logits have 9"):
        SoftTopK(9)(scores(), torch.arange(6))
