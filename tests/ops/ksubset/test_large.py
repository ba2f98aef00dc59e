"""Rows of large k in the compiled kernels: classes are left out of the polynomial by division, from either end."""

import functools
from collections.abc import Callable

import pytest
import torch

from topk_registry.ops.ksubset import smooth_topk_hinge, topk_label_margins, topk_margins
from topk_registry.ops.ksubset.torch import rows

SIZES = [(14, 6), (40, 6), (70, 33), (100, 50), (300, 40), (60, 45), (110, 70)]
LARGEST = [(140, 65), (300, 90), (900, 300)]  # which are computed in double precision
# By division gradients lose up to five bits, and polynomials through 24 points make errors up to 3 times as large,
# their Lebesgue constant. Results of single precision that were computed in double do not show it.
LEBESGUE = {torch.float32: 1, torch.float64: 3}
LOST = {torch.float32: 1, torch.float64: 32 * LEBESGUE[torch.float64]}
CASES = [
    *((n, k, (torch.float32,)) for n, k in SIZES),
    *((n, k, (torch.float32, torch.float64)) for n, k in LARGEST),
]
KINDS = ("near", "apart", "far apart", "gap", "wide gap", "ties", "few left")


def scores(kind: str, n: int, k: int) -> torch.Tensor:
    """Scores [4, n] over a temperature of 1 for the set: k tau = 1."""
    s = torch.randn(4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n + k))
    match kind:
        case "near":
            return 0.3 * s
        case "apart":
            return 3 * s
        case "far apart":
            return 1000 * s
        case "gap":  # in numbers: the k largest lie 30 temperatures above all others
            s[:, 3 : 3 + k] += 30
        case "wide gap":
            s[:, 3 : 3 + k] += 5000
        case "ties":
            return s.round() * 2
        case "few left":
            s[:, k + 2 :] = -torch.inf
    return s


def target_of(target: str, s: torch.Tensor, k: int) -> torch.Tensor:
    n, generator = s.shape[1], torch.Generator().manual_seed(0)
    label = torch.tensor([0, 3, k + 1, 1])
    if target == "labels":
        return label
    if target == "few":
        return 0.7 * torch.eye(n)[label] + 0.3 * torch.eye(n)[label.flip(0)]
    return torch.softmax(torch.randn(4, n, generator=generator), 1) * (s > -torch.inf)


def hinge(
    s: torch.Tensor, q: torch.Tensor, k: int, gaps: str, dtype: torch.dtype, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and its gradient."""
    x, alpha = s.to(dtype).requires_grad_(), torch.linspace(0.2, 2, s.shape[1]) if gaps == "per class" else 1.0
    loss = smooth_topk_hinge(x, q.to(dtype) if q.is_floating_point() else q, k, tau=1 / k, alpha=alpha, impl=impl)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach().double(), gradient.double()


def by_kind(function: Callable, *arguments) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Results of the torch path for four rows of each kind, together: its operations take as long for one row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK", 1 << 23)  # numbers in a block of rows
        results = function(*arguments, torch.float64, "torch")
    return dict(zip(KINDS, zip(*(each.split(4) for each in results), strict=True), strict=True))


@functools.cache
def exact_hinges(n: int, k: int, target: str, gaps: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    s = [scores(kind, n, k).float() for kind in KINDS]
    return by_kind(hinge, torch.cat(s), torch.cat([target_of(target, each, k) for each in s]), k, gaps)


@pytest.mark.parametrize(
    ("target", "gaps"), [("labels", "one"), ("few", "one"), ("dense", "one"), ("dense", "per class")]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "dtypes"), CASES)
def test_is_the_torch_path(n, k, kind, target, gaps, dtypes):
    s = scores(kind, n, k).float()
    q = target_of(target, s, k)
    loss, gradient = exact_hinges(n, k, target, gaps)[kind]
    finite = torch.where(s > -torch.inf, s, 0).abs().amax(1).double()
    for dtype in dtypes:
        found, found_gradient = hinge(s, q, k, gaps, dtype, "numba")
        eps = torch.finfo(dtype).eps
        # a loss is 1 / k of differences of scores, each rounded
        assert ((found - loss).abs() <= 8 * eps * (loss.abs() + finite / k)).all()
        # cotangents of 1 / k in all that cancel leave their own rounding
        # above n / 2 margins are rounded before the hinge: half a unit of k, where its slope of 1 / k falls by 1/4 each
        rounded = 1 / 8 if 2 * k > n else 0.0
        rounding = eps * (2 * gradient.abs().amax(1, keepdim=True) + 1 / k + rounded)
        assert ((found_gradient - gradient).abs() <= rounding * LOST[dtype]).all()


def margins_and_gradient(s: torch.Tensor, k: int, dtype: torch.dtype, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = s.to(dtype).requires_grad_()
    margins = topk_margins(x, k, impl=impl)
    (gradient,) = torch.autograd.grad(margins, x, cotangents(s).to(dtype))
    return margins.detach().double(), gradient.double()


def cotangents(s: torch.Tensor) -> torch.Tensor:
    """Those of each four rows are the same, but for classes that are left out."""
    g = torch.randn(4, s.shape[1], generator=torch.Generator().manual_seed(1))
    return g.repeat(len(s) // 4, 1) * (s > -torch.inf)


@functools.cache
def exact_margins(n: int, k: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return by_kind(margins_and_gradient, torch.cat([scores(kind, n, k).float() for kind in KINDS]), k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "dtypes"), [case for case in CASES if min(case[1], case[0] - case[1]) >= 32])
def test_margins_and_their_gradient_are_those_of_the_torch_path(n, k, kind, dtypes):
    s = scores(kind, n, k).float()
    there, g = s > -torch.inf, cotangents(s)
    margins, gradient = exact_margins(n, k)[kind]
    finite = torch.where(there, s, 0).abs().amax(1, keepdim=True).double()
    for dtype in dtypes:
        found, found_gradient = margins_and_gradient(s, k, dtype, "numba")
        eps = torch.finfo(dtype).eps
        assert (found == margins)[~there].all()
        # a difference of scores and a logarithm, which is exact to its absolute rounding
        assert ((found - margins).abs() <= 4 * LEBESGUE[dtype] * eps * (1 + margins.abs() + finite))[there].all()
        # the cotangents of all classes are summed in those of the coefficients, and leave their own rounding
        rounding = eps * (2 * gradient.abs().amax(1, keepdim=True) + g.double().abs().sum(1, keepdim=True))
        assert ((found_gradient - gradient).abs() <= rounding * LOST[dtype]).all()


def log_binomials(n: int, counts: torch.Tensor) -> torch.Tensor:
    """log C(n, j) of numbers from 0 to n, minus infinity of others."""
    inside = (counts >= 0) & (counts <= n)
    j = counts.clamp(0, n).double()
    log = torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64)) - torch.lgamma(j + 1) - torch.lgamma(n - j + 1)
    return torch.where(inside, log, -torch.inf)


def margin_below_a_gap(k: int, others: int, gap: float) -> float:
    """The margin of a class at 0, beside k classes at the gap and ``others`` more at 0: sets have i of the others."""
    i = torch.arange(k + 1, dtype=torch.float64)

    def log_sigma(size: int) -> torch.Tensor:
        j = size - i  # of the k classes
        return torch.logsumexp(log_binomials(k, j) + log_binomials(others, i) + gap * j, 0)

    return (log_sigma(k - 1) - log_sigma(k)).item()


@pytest.mark.parametrize("impl", ["torch", "numba"])
@pytest.mark.parametrize("gap", [0.0, 2.0, 8.0, 12.0, 30.0, 50.0, 300.0])
@pytest.mark.parametrize(("k", "n"), [(64, 300), (101, 203), (150, 800), (300, 800), (700, 1500), (1000, 2200)])
def test_a_label_below_a_gap(k, n, gap, impl):
    s = torch.zeros(1, n, dtype=torch.float64)
    s[0, 2 : 2 + k] = gap
    s.requires_grad_()
    margin = topk_label_margins(s, torch.tensor([0]), k, impl=impl)
    wanted = margin_below_a_gap(k, n - k - 1, gap)
    assert margin.item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    (gradient,) = torch.autograd.grad(margin.sum(), s)
    step = 1e-4
    slope = (margin_below_a_gap(k, n - k - 1, gap + step) - margin_below_a_gap(k, n - k - 1, gap - step)) / (2 * step)
    assert gradient[0, 2 : 2 + k].sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-5)
    assert gradient.sum().item() == pytest.approx(0, abs=1e-9)  # margins do not depend on the origin
