"""Limits, odd shapes and dtypes, rows with NaN and infinities, and what bad input is told."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from topk_registry.functional import topk_label_margins, topk_log_odds, topk_marginals, topk_margins
from topk_registry.ops.ksubset import definition

INF, NAN = float("inf"), float("nan")


def hard_margins(s, k):
    """s_i less the k-th largest of the other scores, a class at a time."""
    others = [torch.cat((s[:, :i], s[:, i + 1 :]), 1) for i in range(s.shape[1])]
    return torch.stack([s[:, i] - o.topk(k).values[:, -1] for i, o in enumerate(others)], 1)


@pytest.mark.parametrize("temperature", [1e-12, 5e-36, 1e-37, 1e-45, 1e-300])
@pytest.mark.parametrize(("n", "k"), [(30, 5), (6, 5), (12, 6)])
def test_temperature_to_zero_is_the_hard_margin(temperature, n, k):
    s = (10 * torch.randn(4, n, generator=torch.Generator().manual_seed(0))).requires_grad_()
    hard = hard_margins(s.detach(), k)
    soft = topk_margins(s, k, temperature=temperature)
    torch.testing.assert_close(soft, hard, rtol=1e-6, atol=1e-6)
    # each margin pulls its own score up and the k-th best other down
    (gradient,) = torch.autograd.grad(soft[:, 0].sum(), s)
    assert (gradient[:, 0] == 1).all()
    assert torch.equal(gradient.sort(1).values[:, [0, 1, -1]], torch.tensor([[-1.0, 0.0, 1.0]] * 4))

    label = torch.arange(4)
    picked = topk_label_margins(s, label, k, temperature=temperature)
    torch.testing.assert_close(picked.float(), hard.gather(1, label[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(picked.sum(), s)
    assert torch.equal(gradient.sort(1).values[:, [0, 1, -1]], torch.tensor([[-1.0, 0.0, 1.0]] * 4))


def test_large_temperature_is_uniform():
    s = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(topk_marginals(s, 5, temperature=1e30), torch.full_like(s, 0.25))


@pytest.mark.parametrize("k", [5, 15])
@pytest.mark.parametrize("temperature", [1e37, 3e38, 1e39, 1e300])
def test_temperature_beyond_single_precision(temperature, k):
    """The margin, T log(k / (n - k)) in the limit, may leave the range of single precision; marginals never do."""
    s = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    marginals = topk_marginals(s, k, temperature=temperature)
    torch.testing.assert_close(marginals, torch.full_like(s, k / 20))
    marginals.square().sum().backward()
    assert s.grad.isfinite().all()
    limit = torch.full(s.shape, temperature * math.log(k / (20 - k)), dtype=torch.float64)
    # plus or minus infinity beyond the range
    torch.testing.assert_close(topk_margins(s, k, temperature=temperature), limit.float())
    picked = topk_label_margins(s, torch.tensor([0, 1, 2]), k, temperature=temperature)
    torch.testing.assert_close(picked, limit[:, 0])


def test_k_of_one_is_softmax():
    s = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(topk_marginals(s, 1), s.softmax(-1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_leading_axes_and_strides(k):
    s = torch.randn(7, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).movedim(0, -1)
    assert not s.is_contiguous()
    expected = definition.log_odds_by_recursion(s, k)
    torch.testing.assert_close(topk_log_odds(s, k), expected)
    torch.testing.assert_close(topk_log_odds(s[0, 0], k), expected[0, 0])
    rows = torch.randn(2, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[:, ::2]
    label = torch.tensor([0, 6])
    expected = definition.log_odds_by_recursion(rows, k).gather(1, label[:, None])[:, 0]
    torch.testing.assert_close(topk_label_margins(rows, label, k), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_computed_in_single(dtype):
    s = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    found = topk_log_odds(s, 5)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide = s.detach().to(found.dtype).requires_grad_()
    torch.testing.assert_close(found, topk_log_odds(wide, 5), rtol=0, atol=0)
    found.square().sum().backward()
    topk_log_odds(wide, 5).square().sum().backward()
    assert s.grad.dtype == dtype
    torch.testing.assert_close(s.grad, wide.grad.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("k", [2, 6])
def test_k_may_be_any_integer(k):
    s = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(topk_margins(s, np.int64(k)), topk_margins(s, k))
    label = torch.tensor([0, 1, 2])
    assert torch.equal(topk_label_margins(s, label, np.int32(k)), topk_label_margins(s, label, k))


def test_autocast_does_not_reach_inside():
    s = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = topk_log_odds(s, 5)
    torch.testing.assert_close(found, topk_log_odds(s, 5), rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_nan_row_is_nan_alone(k):
    s = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    clean = topk_log_odds(s, k)
    s[1, 3] = NAN
    label = torch.tensor([0, 1, 2, 3])
    x, y = s.clone().requires_grad_(), s.clone().requires_grad_()
    found, picked = topk_log_odds(x, k), topk_label_margins(y, label, k)
    found.sum().backward()
    picked.sum().backward()
    others = [0, 2, 3]
    assert found[1].isnan().all()
    assert picked[1].isnan()
    assert x.grad[1].isnan().any()
    torch.testing.assert_close(found[others], clean[others], rtol=0, atol=0)
    for gradient in (x.grad, y.grad):
        assert gradient[others].isfinite().all()


@pytest.mark.parametrize(("n", "k"), [(6, 2), (9, 3), (8, 5)])
def test_excluded_classes_have_no_chance(n, k):
    s = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s[:, [1, n - 1]] = -INF
    kept = [i for i in range(n) if i not in (1, n - 1)]
    x = s.clone().requires_grad_()
    pi = topk_marginals(x, k)
    assert (pi[:, [1, n - 1]] == 0).all()
    torch.testing.assert_close(pi[:, kept], torch.sigmoid(definition.log_odds_by_recursion(s[:, kept], k)))

    y = s.clone().requires_grad_()
    label = torch.zeros(3, dtype=torch.long)
    picked = topk_label_margins(y, label, k)
    torch.testing.assert_close(picked, definition.log_odds_by_recursion(s[:, kept], k)[:, 0])
    picked.sum().backward()
    # exact where they are left out by Horner's rule; for 2k > n they are classes that are always chosen instead
    assert (y.grad[:, [1, n - 1]].abs() <= (0.0 if 2 * k <= n else 1e-15)).all()
    assert y.grad.isfinite().all()


def test_a_label_that_is_excluded_costs_infinitely_much():
    s = torch.tensor([[0.0, 1.0, -INF, 2.0]])
    assert topk_label_margins(s, torch.tensor([2]), 2).item() == -INF


@pytest.mark.parametrize("k", [1, 2, 4])
def test_an_empty_batch(k):
    s = torch.zeros(0, 5, requires_grad=True)
    assert topk_log_odds(s, k).shape == (0, 5)
    picked = topk_label_margins(s, torch.zeros(0, dtype=torch.long), k)
    assert picked.shape == (0,)
    (topk_marginals(s, k).sum() + picked.sum()).backward()
    assert s.grad.shape == (0, 5)


def test_rows_do_not_depend_on_each_other():
    s = torch.randn(70, 1000, generator=torch.Generator().manual_seed(0))  # more than a block of rows
    label = torch.randint(1000, (70,), generator=torch.Generator().manual_seed(1))
    together = topk_margins(s, 5), topk_label_margins(s, label, 5)
    alone = topk_margins(s[66:67], 5), topk_label_margins(s[66:67], label[66:67], 5)
    for whole, one in zip(together, alone, strict=True):
        torch.testing.assert_close(whole[66:67], one, rtol=1e-6, atol=1e-6)


def test_a_common_shift_changes_nothing():
    s = torch.randint(-8, 8, (3, 30), generator=torch.Generator().manual_seed(0)).float()
    torch.testing.assert_close(topk_log_odds(s + 4096.0, 4), topk_log_odds(s, 4), rtol=0, atol=0)


def test_compiles_into_one_graph():
    k = 3
    s = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([0, 3, 5, 7])

    def gradient(f):
        x = s.clone().requires_grad_()
        loss = f(x)
        loss.backward()
        return loss.detach(), x.grad

    def loss(x):
        return topk_marginals(x, k).square().sum() + topk_label_margins(x, label, k).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, expected in zip(gradient(compiled), gradient(loss), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, y: topk_margins(s, 0), r"k must be an integer from 1 to n - 1 = 4, got 0"),
        (lambda s, y: topk_margins(s, 5), r"k must be an integer from 1 to n - 1 = 4, got 5"),
        (lambda s, y: topk_margins(s, 2.0), r"k must be an integer from 1 to n - 1 = 4, got 2.0"),
        (lambda s, y: topk_margins(s, True), r"k must be an integer"),
        (lambda s, y: topk_margins(s, 2, temperature=0.0), r"temperature must be a finite number above 0, got 0.0"),
        (lambda s, y: topk_margins(s, 2, temperature=NAN), r"temperature must be a finite number above 0, got nan"),
        (lambda s, y: topk_margins(s, 2, temperature=INF), r"temperature must be a finite number above 0, got inf"),
        (lambda s, y: topk_margins(s.long(), 2), r"logits must be floating point \[..., n\], got torch.int64 \[2, 5\]"),
        (lambda s, y: topk_margins(torch.tensor(1.0), 2), r"logits must be floating point"),
        (lambda s, y: topk_margins(s, 2, impl="cuda"), r"impl must be 'auto' or one of 'numba', 'triton', 'torch'"),
        (lambda s, y: topk_label_margins(s, y[:1], 2), r"int64 labels \[B\], got \[2, 5\] and torch.int64 \[1\]"),
        (lambda s, y: topk_label_margins(s, y.int(), 2), r"got \[2, 5\] and torch.int32 \[2\]"),
        (lambda s, y: topk_label_margins(s, y + 4, 2), r"label must be in \[0, 4\], got 5"),
        (
            lambda s, y: topk_margins(torch.tensor([[1.0, 2, 3], [1, -INF, -INF]]), 1),
            r"at least k \+ 1 = 2 scores above",
        ),
    ],
)
def test_bad_input_is_told_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 5), torch.tensor([0, 1]))


def test_cross_entropy_to_rounding():
    s = torch.randn(16, 100, generator=torch.Generator().manual_seed(0)).requires_grad_()
    label = torch.arange(16)
    ours = F.softplus(-topk_label_margins(s, label, 1)).mean()
    theirs = F.cross_entropy(s, label)
    assert math.isclose(ours.item(), theirs.item(), rel_tol=1e-6)
    (a,), (b,) = torch.autograd.grad(ours, s), torch.autograd.grad(theirs, s)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * b.abs().max().item())
