"""The operator fused with a linear classifier, against the operator on the logits."""

import pytest
import torch
from torch.nn import functional as F

from topk_registry import LabelMixture
from topk_registry.functional import linear_smooth_topk, topk_label_margins, topk_marginals
from topk_registry.ops.ksubset.chunked import custom_ops as linear_ops
from topk_registry.ops.ksubset.chunked.api import linear_label_margins, linear_topk

INF = float("inf")


def layer(n, *, B=6, d=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    features, weight, bias = (torch.randn(shape, dtype=dtype, generator=generator) for shape in ((B, d), (n, d), (n,)))
    label = torch.randint(n, (B,), generator=generator)
    return *(t.requires_grad_() for t in (features, weight, bias)), label


def margins_of_logits(features, weight, bias, label, k, temperature=1.0):
    return topk_label_margins(F.linear(features, weight, bias), label, k, temperature=temperature, impl="torch")


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 5, 12, 29, 60])
@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (4, 0.3), (14, 2.0), (15, 1.0), (28, 0.5)])
def test_margins_and_gradients_are_those_of_the_logits(k, temperature, chunk):
    *tensors, label = layer(29, dtype=torch.float64)
    expected = margins_of_logits(*tensors, label, k, temperature)
    found = linear_label_margins(*tensors, label, k, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    g = torch.arange(1.0, 7.0, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(found, tensors, g), torch.autograd.grad(expected, tensors, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_as_operators_of_torch():
    features, weight, bias, label = layer(30, B=3)
    arguments = (features.detach(), weight.detach(), bias.detach(), label, 3, 1.0, 11, torch.float32)
    margin, *state = linear_ops.label_margins(*arguments)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(linear_ops.label_margins, arguments, test_utils=checks)
    for wanted in ([True, True, True], [False, True, False]):
        g = torch.ones_like(margin)
        torch.library.opcheck(linear_ops.label_margins_backward, (g, *state, *arguments, wanted), test_utils=checks)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradcheck(with_bias):
    features, weight, bias, label = layer(17, B=3, d=4, dtype=torch.float64)
    tensors = (features, weight, bias) if with_bias else (features, weight)

    def f(features, weight, bias=None):
        return linear_label_margins(features, weight, bias, label, 3, temperature=0.7, chunk=6)

    assert torch.autograd.gradcheck(f, tensors)


@pytest.mark.parametrize(("n", "k"), [(3000, 1), (3000, 5), (700, 65), (2300, 1100)])
def test_single_precision(n, k):
    """No further from double precision than the operator on the logits is, but for the order of sums."""
    *tensors, label = layer(n)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = margins_of_logits(*exact, label, k, 0.5 * k)
    found = linear_label_margins(*tensors, label, k, temperature=0.5 * k, chunk=256)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=3e-6)  # the logits are sums of eight products
    gradients = torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), exact)
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 3e-6 * b.abs().max()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_wanted(wanted):
    *tensors, label = layer(30)
    expected = torch.autograd.grad(margins_of_logits(*tensors, label, 3).sum(), tensors)
    for i, t in enumerate(tensors):
        t.requires_grad_(i in wanted)
    linear_label_margins(*tensors, label, 3, chunk=7).sum().backward()
    for i, t in enumerate(tensors):
        if i in wanted:
            torch.testing.assert_close(t.grad, expected[i], rtol=1e-5, atol=1e-6)
        else:
            assert t.grad is None


def test_nothing_is_kept_without_gradients():
    *tensors, label = layer(30)
    with torch.no_grad():
        assert not linear_label_margins(*tensors, label, 3).requires_grad
    assert not linear_label_margins(*(t.detach() for t in tensors), label, 3).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_is_that_of_the_logits(dtype, autocast):
    *tensors, label = layer(500)
    if not autocast:
        tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        expected, found = margins_of_logits(*tensors, label, 5), linear_label_margins(*tensors, label, 5, chunk=90)
    # the same half-precision logits: the rest is in single precision
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    eps = torch.finfo(dtype).eps
    for a, b, t in zip(*(torch.autograd.grad(m.sum(), tensors) for m in (found, expected)), tensors, strict=True):
        assert a.dtype == t.dtype
        # both round the gradient of the logits, and then what they multiply it to; here a chunk at a time
        assert (a - b).abs().max() <= 2 * eps * b.abs().max()


def test_autocast_leaves_double_precision_alone():
    *tensors, label = layer(40, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_label_margins(*tensors, label, 5, chunk=9)
    torch.testing.assert_close(found, margins_of_logits(*tensors, label, 5), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [4, 50])
def test_excluded_classes(chunk):
    features, weight, bias, _ = layer(40, dtype=torch.float64)
    with torch.no_grad():
        bias[10:34] = -INF
    tensors, label = (features, weight, bias), torch.tensor([0, 9, 34, 39, 35, 1])
    found, expected = linear_label_margins(*tensors, label, 3, chunk=chunk), margins_of_logits(*tensors, label, 3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(m.sum(), tensors) for m in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("k", "left"), [(3, 3), (20, 20)])
def test_too_few_scores_are_told_of(k, left):
    features, weight, bias, _ = layer(30)
    with torch.no_grad():
        bias[left:] = -INF
    with pytest.raises(ValueError, match=rf"at least k \+ 1 = {k + 1} scores above -inf"):
        linear_label_margins(features, weight, bias, torch.zeros(6, dtype=torch.long), k, chunk=8)


@pytest.mark.parametrize(("k", "left"), [(3, 3), (20, 20)])
@pytest.mark.parametrize("kind", ["labels", "smoothed", "mixture", "distribution"])
def test_too_few_scores_are_told_of_with_targets_of_every_kind(kind, k, left):
    features, weight, bias, _ = layer(30)
    target = {
        "mixture": LabelMixture(torch.tensor([[0, 1]] * 6), torch.full((6, 2), 0.5)),
        "distribution": torch.full((6, 30), 1 / 30),
    }.get(kind, torch.zeros(6, dtype=torch.long))
    options = {"k": k, "chunk": 8, "label_smoothing": 0.1 if kind == "smoothed" else 0.0}
    with torch.no_grad():
        bias[left + 1 :] = -INF
    # the loss of a class that is ruled out is infinite, and so it may be
    assert not linear_smooth_topk(features, weight, bias, target, **options).isnan()
    with torch.no_grad():
        bias[left:] = -INF
    with pytest.raises(ValueError, match=rf"at least k \+ 1 = {k + 1} scores above -inf"):
        linear_smooth_topk(features, weight, bias, target, **options)


@pytest.mark.parametrize(
    ("n", "k", "temperature", "chunk"),
    [(300, 5, 0.5, 40), (300, 5, 1e-36, 7), (300, 1, 1.0, 1), (300, 140, 1.0, 50), (30, 20, 1.0, 7), (12, 6, 1.0, 2)],
)
def test_the_best_classes_with_their_marginals(n, k, temperature, chunk):
    features, weight, bias, _ = layer(n)
    found = linear_topk(features, weight, bias, k, temperature=temperature, chunk=chunk)
    logits = F.linear(features, weight, bias).detach()
    best = logits.topk(k)
    assert torch.equal(found.indices, best.indices)
    torch.testing.assert_close(found.logits, best.values, rtol=1e-6, atol=1e-6)
    marginals = topk_marginals(logits.double(), k, temperature=temperature).gather(1, best.indices)
    torch.testing.assert_close(found.marginals, marginals.float(), rtol=0, atol=2e-6)
    assert found.marginals.dtype == torch.float32
    assert not found.marginals.requires_grad


def test_the_best_classes_under_autocast_and_in_an_empty_batch():
    features, weight, bias, _ = layer(300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_topk(features, weight, bias, 3, chunk=40)
        assert torch.equal(found.logits, F.linear(features, weight, bias).topk(3).values)
    empty = linear_topk(features[:0], weight, bias, 3, chunk=40)
    assert [t.shape for t in empty] == [(0, 3)] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(6, 7)}, r"expected features \[B, d\], weight \[n, d\] and bias \[n\] or None, got"),
        ({"features": torch.zeros(8)}, r"expected features"),
        ({"bias": torch.zeros(29)}, r"got \[\[6, 8\], \[30, 8\], \[29\]\]"),
        (
            {"features": torch.zeros(6, 8).double()},
            r"of one dtype outside autocast, got \[torch.float64, torch.float32",
        ),
        ({"features": torch.zeros(6, 8, dtype=torch.long)}, r"must be floating point"),
        ({"label": torch.zeros(5, dtype=torch.long)}, r"label must be int64 \[6\], got torch.int64 \[5\]"),
        ({"label": torch.zeros(6)}, r"label must be int64 \[6\], got torch.float32 \[6\]"),
        ({"label": torch.full((6,), 30)}, r"label must be in \[0, 29\], got 30"),
        ({"k": 30}, r"k must be an integer from 1 to n - 1 = 29, got 30"),
        ({"temperature": 0.0}, r"temperature must be a finite number above 0, got 0.0"),
        ({"chunk": 0}, r"chunk must be a number of classes of at least 1, got 0"),
        ({"chunk": 2.5}, r"chunk must be a number of classes of at least 1, got 2.5"),
    ],
)
def test_bad_input_is_told_what_is_wrong(change, message):
    features, weight, bias, label = layer(30)
    arguments = {"features": features, "weight": weight, "bias": bias, "label": label, "k": 3}
    with pytest.raises(ValueError, match=message):
        linear_label_margins(**{**arguments, **change})
