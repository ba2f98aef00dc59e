"""Rows of nearly equal odds in the compiled kernels, on either side of the limits of the expansion."""

import numpy as np
import pytest
import torch

from tests import oracles
from tests.ops.compiled import for_python
from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.ksubset.numba import backend, groups, narrow

centred, expand, krawtchouk = map(for_python, (narrow.centred, narrow.expand, narrow.krawtchouk))
odds_of_largest = for_python(groups.odds_of_largest)
SIZES = [(90, 32), (100, 50), (300, 40)]
SIZES_OF_TARGETS = [(40, 6), (100, 50), (300, 20)]
KINDS = ("gaussian", "two values", "one leader")
SIDES = [(0, 0.0), (0, 0.99), (0, 1.01), (1, 0.99), (1, 1.01)]  # which largest ratio, and how much of it


def row_of(kind: str, n: int, k: int, tier: int, side: float, left_out: int = 1) -> np.ndarray:
    """Scores of n classes whose ratio of variances is so much of a limit in single precision, the first left out."""
    generator = np.random.default_rng(n + k)
    s = {
        "gaussian": generator.standard_normal(n),
        "two values": np.where(np.arange(n) % 3 == 0, 1.0, -1.0),
        "one leader": np.where(np.arange(n) == n // 2, 1.0, 1e-3 * generator.standard_normal(n)),
    }[kind]
    p, limits, _ = expand(n - 1, left_out, k, 4)
    low, high = 0.0, 50.0
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if ratio_of(scale * s[1:], p) < side * limits[tier] else (low, scale)
    return (low * s).astype(np.float32)


def ratio_of(x: np.ndarray, p: float) -> float:
    odds = np.exp(x.astype(np.float64))
    v = p / (1 - p) * odds / odds.mean()
    d = v / (1 + v) - p
    return max((d**2).sum(), d.sum() ** 2) / (len(d) * p * (1 - p))


def terms_of(s: np.ndarray, k: int) -> int:
    """How many terms beyond the first the kernel takes."""
    x, terms = np.append(s, np.full(-len(s) % 64, -np.inf, np.float32)), np.empty((2, narrow.MOST_TERMS + 1))
    x[0] = -np.inf
    w, numbers = np.empty_like(x), expand(len(s) - 1, 1, k, 4)
    mass = odds_of_largest(x, 1.0, w)[1]
    return centred(w, mass, len(s) - 1, numbers, np.empty_like(x), terms[0], terms[1])[0]


@pytest.mark.parametrize(("tier", "side"), SIDES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_losses_and_gradients(kind, n, k, tier, side):
    s = row_of(kind, n, k, tier, side)
    if kind != "one leader":  # odds that are too large end the search before
        assert terms_of(s, k) == ((narrow.FEW_TERMS, narrow.MOST_TERMS, 0)[tier + (side > 1)])
    loss, gradient = oracles.mp_smooth_svm(s.tolist(), 0, k, 1 / k)
    for dtype, eps in ((torch.float32, 2.0**-23), (torch.float64, 2.0**-50)):
        x = torch.tensor(s[None], dtype=dtype, requires_grad=True)
        found = smooth_topk_hinge(x, torch.tensor([0]), k, tau=1 / k, impl="numba")
        found.sum().backward()
        exact = torch.tensor(gradient, dtype=torch.float64)
        assert found.item() == pytest.approx(loss, rel=8 * eps)
        assert (x.grad[0] - exact).abs().max() <= 4 * eps * exact.abs().max()
        # the entries of all other classes, as large as the n-th part of the label's
        others = exact[1:].abs().max()
        assert (x.grad[0] - exact)[1:].abs().max() <= 100 * eps * others


def targets(n: int) -> dict[str, torch.Tensor]:
    few, dense = torch.zeros(1, n, dtype=torch.float64), torch.linspace(0, 1, n, dtype=torch.float64)[None]
    few[0, [0, n // 2]] = torch.tensor([0.7, 0.3], dtype=torch.float64)
    return {"few": few, "smoothed": 0.9 * few + 0.1 / n, "dense": dense / dense.sum()}


@pytest.mark.parametrize(("tier", "side"), SIDES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES_OF_TARGETS)
def test_distributions(kind, n, k, tier, side):
    s, alpha = row_of(kind, n, k, tier, side, left_out=0), torch.linspace(0.5, 1.5, n, dtype=torch.float64)

    def result(q, gap, dtype, impl):
        x = torch.tensor(s[None], dtype=dtype, requires_grad=True)
        loss = smooth_topk_hinge(x, q.to(dtype), k, tau=1 / k, alpha=gap.to(dtype), impl=impl)
        loss.sum().backward()
        return loss.item(), x.grad[0].double()

    for q in targets(n).values():
        for gap in (alpha, alpha[0]):
            loss, gradient = result(q, gap, torch.float64, "torch")
            for dtype, eps in ((torch.float32, 2.0**-23), (torch.float64, 2.0**-49)):
                found, found_gradient = result(q, gap, dtype, "numba")
                assert found == pytest.approx(loss, rel=8 * eps)
                # cotangents of 1 / k in all that cancel leave their own rounding
                rounding = eps * (2 * gradient.abs().max() + 1 / k)
                assert (found_gradient - gradient).abs().max() <= rounding


def test_small_k_is_not_tried():
    """There other rows are as quick, or quicker."""
    made = [backend.loss_kernel(k, 1.0, 1 / k, 1 / k) for k in (5, 6, 31, 32)]
    assert [one.of_targets.endswith("_of_large_k") for one in made] == [False, True, True, True]
    assert [one.of_labels.endswith("_of_large_k") for one in made] == [False, False, False, True]


def test_terms_are_coefficients_of_products():
    """[X^x] (X - 1)^m (q + p X)^(N - m) by multiplying out."""
    n, k, p = 31, 8, 7.5 / 31
    for N, x in ((n, k - 1), (n, k), (n - 1, k - 2), (n - 1, k - 1)):
        row = np.empty(narrow.MOST_TERMS + 1)
        krawtchouk(N, p, x, row)
        of_equal = np.polynomial.Polynomial([1 - p, p])
        for m in range(narrow.MOST_TERMS + 1):
            product = np.polynomial.Polynomial([-1, 1]) ** m * of_equal ** (N - m)
            assert row[m] == pytest.approx(product.coef[x] / (of_equal**N).coef[x], rel=1e-8, abs=1e-10)


def test_narrow_and_other_rows_of_a_batch_do_not_mix():
    """Rows between narrow ones are taken together; each is as it is alone, bit for bit."""
    s = torch.randn(23, 100, generator=torch.Generator().manual_seed(0))
    s *= torch.tensor([0.01, 30.0, 0.01, 30.0, 30.0, 3.0, 0.01])[torch.arange(23) % 7, None]
    s[3, 7], s[9, 4] = -torch.inf, -torch.inf
    label = torch.arange(23)
    q = torch.softmax(torch.randn(23, 100, generator=torch.Generator().manual_seed(1)), -1)
    for target in (label, q):
        x = s.clone().requires_grad_()
        together = smooth_topk_hinge(x, target, 50, tau=0.1, impl="numba")
        together.sum().backward()
        for r in range(23):
            row = s[r : r + 1].clone().requires_grad_()
            alone = smooth_topk_hinge(row, target[r : r + 1], 50, tau=0.1, impl="numba")
            alone.sum().backward()
            assert torch.equal(alone[0], together[r])
            assert torch.equal(row.grad[0], x.grad[r])
