"""Single precision against extended precision, over every kind of row, size and temperature that is promised."""

import functools

import pytest
import torch
from torch.nn import functional as F

from tests import oracles
from tests.ops.ksubset.scores import KINDS, NEARLY_FLAT, TAUS, nearly_flat, scores
from topk_registry.functional import topk_label_margins, topk_log_odds, topk_marginals, topk_margins
from topk_registry.ops.ksubset import definition, smooth_topk_hinge

ON_CPU = ("torch", "numba")
SIZES = [
    (2, 1),
    (3, 2),
    (6, 2),
    (7, 6),
    (20, 10),
    (64, 5),
    (64, 25),
    (64, 60),
    (120, 50),
    (200, 50),
    (1000, 1),
    (1000, 5),
]
LARGE = [(1000, 20), (1000, 50)]


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES + LARGE)
@pytest.mark.slow
def test_log_odds_and_marginals(kind, n, k, impl):
    s = scores(kind, n, rows=1)
    for tau, exact in exact_log_odds(kind, n, k).items():
        theta = k * tau
        found = topk_margins(s, k, temperature=theta, impl=impl).double() / theta
        near = exact.abs() < 60
        # a log-odds close to zero is the difference of numbers of order one: relative to those
        assert ((found - exact).abs() <= 1e-5 * exact.abs().clamp(min=1.0))[near].all(), tau
        pi = topk_marginals(s, k, temperature=theta, impl=impl).double()
        assert (pi - torch.sigmoid(exact)).abs().max() <= 1e-6, tau
        assert (pi.sum(-1) - k).abs().max() <= 1e-5 * k, tau


@functools.cache  # for each backend
def exact_log_odds(kind, n, k):
    taus = TAUS if (n, k) in SIZES else (0.1,)
    x = torch.cat([scores(kind, n, rows=1).double() / (k * tau) for tau in taus])
    return dict(zip(taus, torch.from_numpy(oracles.log_odds(x.tolist(), k))[:, None], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES + LARGE)
@pytest.mark.slow
def test_loss_at_a_label_and_its_gradient(kind, n, k):
    taus = TAUS if (n, k) in SIZES else (0.1,)
    s = scores(kind, n, rows=1)
    label = torch.tensor([*{0, n // 2, int(s.argmin())}])
    exact = oracles.smooth_svm(s[0].tolist(), label.tolist(), k, taus)
    for tau, loss, gradient in zip(taus, *map(torch.from_numpy, exact), strict=True):
        for impl in ON_CPU:
            x = s.repeat(len(label), 1).requires_grad_()
            margin = topk_label_margins(x, label, k, temperature=k * tau, impl=impl)
            found = F.softplus(1.0 - margin / k, beta=1 / tau, threshold=40.0)
            found.sum().backward()
            assert ((found.double() - loss).abs() <= (1e-6 * loss).clamp(min=1e-30)).all(), (impl, tau)
            allowed = 2e-6 * gradient.abs().amax(1, keepdim=True) + 1e-30
            assert ((x.grad - gradient).abs() <= allowed).all(), (impl, tau)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0.5, 0.999, 1.001, 1.2, 1.9])
@pytest.mark.parametrize("kind", NEARLY_FLAT)
@pytest.mark.parametrize(("n", "k"), [(200, 2), (200, 5), (200, 20), (200, 50), (1000, 5)])
def test_rows_on_either_side_of_flat(n, k, kind, side):
    """Rows just below the bound have no top group, those just above it have one."""
    s = nearly_flat(kind, n, k, side)
    log_odds = torch.from_numpy(oracles.log_odds(s.tolist(), k))
    y = int(s.argmin())  # the label is left out: the bound is that of all other classes
    loss, gradient = oracles.smooth_svm(s[0].tolist(), [y], k, [1 / k])
    loss, gradient = loss.item(), torch.from_numpy(gradient[0, 0])
    q = torch.softmax(s.double(), -1)
    exact = gradient_of_expectation(s, q, k, torch.float64, "torch")
    for impl in ON_CPU:
        found = topk_margins(s, k, impl=impl).double()
        assert ((found - log_odds).abs() <= 5e-6 * log_odds.abs().clamp(min=1.0)).all(), impl
        x = s.clone().requires_grad_()
        hinge = smooth_topk_hinge(x, torch.tensor([y]), k, tau=1 / k, impl=impl)
        hinge.sum().backward()
        assert hinge.item() == pytest.approx(loss, rel=1e-6), impl
        assert (x.grad[0] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), impl

        g = gradient_of_expectation(s, q, k, torch.float32, impl)
        assert (g - exact).abs().max() <= 2e-6 * exact.abs().max() + 8 * torch.finfo(torch.float32).eps / k, impl


def gradient_of_expectation(s, q, k, dtype, impl):
    x = s.to(dtype, copy=True).requires_grad_()
    smooth_topk_hinge(x, q.to(dtype), k, tau=1 / k, impl=impl).sum().backward()
    return x.grad.double()


@pytest.mark.slow
@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [*SIZES[:-2], (1000, 5), (1000, 50)])
def test_gradient_for_a_distribution_over_labels(kind, n, k, impl):
    """Against the float64 path, itself tested against the definition below."""
    rows = slice(2 * KINDS.index(kind), 2 * KINDS.index(kind) + 2)
    for tau in TAUS:

        def gradients(dtype, impl, tau=tau):
            return [each[rows] for each in gradients_of_all_kinds(n, k, tau, dtype, impl)]

        _, found = gradients(torch.float32, impl)
        cotangent, exact = gradients(torch.float64, "torch")
        # where the cotangents cancel (nearly flat rows), what is left is no better than their own rounding
        rounding = 8 * torch.finfo(torch.float32).eps * cotangent.abs().amax(-1, keepdim=True)
        allowed = 2e-6 * exact.abs().amax(-1, keepdim=True) + rounding
        assert ((found - exact).abs() <= allowed).all(), tau


@functools.cache  # all kinds of rows cost as much as one
def gradients_of_all_kinds(n, k, tau, dtype, impl):
    q = torch.softmax(torch.randn(2, n, generator=torch.Generator().manual_seed(n)), -1).repeat(len(KINDS), 1)
    x = torch.cat([scores(kind, n) for kind in KINDS]).to(dtype).requires_grad_()
    m = topk_margins(x, k, temperature=k * tau, impl=impl)
    m.retain_grad()
    (q.to(dtype) * F.softplus(1.0 - m / k, beta=1 / tau, threshold=40.0)).sum().backward()
    return m.grad.double(), x.grad.double()


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 2), (8, 3), (9, 7), (12, 6)])
def test_the_definitions_agree(n, k):
    x = 3 * torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    by_recursion = definition.log_odds_by_recursion(x, k)
    torch.testing.assert_close(definition.log_odds_by_enumeration(x, k), by_recursion)
    expected = torch.tensor([oracles.subset_log_odds(row, k) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(by_recursion, expected)
    torch.testing.assert_close(topk_log_odds(x, k), by_recursion)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(4, 1), (6, 3), (7, 5), (13, 4), (40, 12)])
def test_double_precision_gradients_are_the_definitions(n, k):
    generator = torch.Generator().manual_seed(n)
    x = (2 * torch.randn(3, n, dtype=torch.float64, generator=generator)).requires_grad_()
    cotangent = torch.randn(3, n, dtype=torch.float64, generator=generator)
    (expected,) = torch.autograd.grad(definition.log_odds_by_recursion(x, k), x, cotangent)
    (found,) = torch.autograd.grad(topk_log_odds(x, k), x, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)

    label = torch.randint(n, (3,), generator=generator)
    picked = topk_label_margins(x, label, k)
    torch.testing.assert_close(picked, definition.log_odds_by_recursion(x, k).gather(1, label[:, None])[:, 0])
    one_hot = torch.zeros_like(x).scatter_(1, label[:, None], 1.0)
    (expected,) = torch.autograd.grad(definition.log_odds_by_recursion(x, k), x, one_hot)
    (found,) = torch.autograd.grad(picked.sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n", "k", "temperature"), [(5, 2, 1.0), (9, 4, 0.3), (9, 8, 2.0), (14, 3, 0.05)])
def test_gradcheck(n, k, temperature):
    x = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: topk_margins(x, k, temperature=temperature), x)
    assert torch.autograd.gradcheck(lambda x: topk_marginals(x, k, temperature=temperature), x)
    label = torch.tensor([0, n - 1])
    assert torch.autograd.gradcheck(lambda x: topk_label_margins(x, label, k, temperature=temperature), x)


@pytest.mark.parametrize(("n", "k"), [(1001, 64), (1001, 65), (1001, 200), (1001, 500), (600, 100), (2500, 1200)])
@pytest.mark.parametrize("kind", ["flat", "gaussian", "block"])
@pytest.mark.slow
def test_large_k(kind, n, k):
    _check_beyond_the_grid(scores(kind, n, rows=1), k)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "k"), [("flat", 5), ("gaussian", 50), ("flat", 100), ("flat", 500), ("gaussian", 500)]
)
def test_a_hundred_thousand_classes(kind, k):
    _check_beyond_the_grid(scores(kind, 100_000, rows=1), k)


def _check_beyond_the_grid(s, k):
    n = s.shape[1]
    x = s.clone().requires_grad_()
    pi = topk_marginals(x, k)
    if (s == s[:, :1]).all():
        exact = torch.full((1, n), k / n, dtype=torch.float64)
        torch.testing.assert_close(pi.double(), exact, rtol=0.0, atol=1e-5)
    else:
        classes = [1, n // 2, int(s.argmax())]
        exact = torch.sigmoid(torch.tensor(oracles.spot_log_odds(s[0].tolist(), k, classes), dtype=torch.float64))
        torch.testing.assert_close(pi[0, classes].double(), exact, rtol=0.0, atol=1e-5)
    assert abs(pi.double().sum().item() - k) <= 1e-5 * k
    pi.square().sum().backward()
    assert x.grad.isfinite().all()
    y = s.clone().requires_grad_()
    topk_label_margins(y, torch.tensor([0]), k).sum().backward()
    assert y.grad.isfinite().all()
    assert abs(y.grad.double().sum().item()) < 1e-4  # a common shift changes nothing
