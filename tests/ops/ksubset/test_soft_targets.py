"""The smooth top-k SVM on distributions over labels: against the table of all losses in double precision."""

import pytest
import torch
from torch import Tensor

from tests.ops.ksubset.scores import KINDS, scores
from topk_registry.functional import soft_hinge, topk_margins
from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.targets.label_mixture import LabelMixture

INF, NAN = float("inf"), float("nan")
ON_CPU = ("numba", "torch")
FORMS = ("labels", "dense", "sparse", "smoothed", "mixed", "mixed and smoothed")


def target_of(form: str, B: int, n: int) -> Tensor | LabelMixture:
    g = torch.Generator().manual_seed(n)
    y, other = torch.randint(n, (2, B), generator=g)
    if form == "labels":
        return y
    if form == "dense":
        return torch.softmax(torch.randn(B, n, generator=g), -1)
    if form == "sparse":
        return LabelMixture.mixed(y, other, 0.3).dense(n)
    if form == "smoothed":
        return LabelMixture.smoothed(y, 0.1)
    return LabelMixture.mixed(y, other, torch.rand(B, generator=g), 0.1 if form == "mixed and smoothed" else 0.0)


def dense(target: Tensor | LabelMixture, n: int) -> Tensor:
    if isinstance(target, LabelMixture):
        return target.dense(n, torch.float64)
    return target.double() if target.is_floating_point() else torch.nn.functional.one_hot(target, n).double()


def by_table(s, target, k, tau, alpha, weight=None, reduction="none") -> tuple[Tensor, Tensor]:
    """The definition, in double precision: the loss and its gradient."""
    x = s.detach().double().requires_grad_()
    table = soft_hinge(torch.as_tensor(alpha).double() - topk_margins(x, k, temperature=k * tau, impl="torch") / k, tau)
    q = dense(target, s.shape[1]) * (1.0 if weight is None else weight.double())
    loss = torch.where(q == 0, 0.0, q * table).sum(-1)
    if reduction == "mean" and weight is not None and isinstance(target, Tensor) and not target.is_floating_point():
        loss = loss.sum() / weight.double()[target].sum()
    elif reduction != "none":
        loss = loss.mean() if reduction == "mean" else loss.sum()
    loss.sum().backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def found(s, target, *args, **options) -> tuple[Tensor, Tensor]:
    x = s.clone().requires_grad_()
    loss = smooth_topk_hinge(x, target, *args, **options)
    loss.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == s.dtype
    return loss.detach(), x.grad


def assert_exact(loss, gradient, expected, expected_gradient, cotangent):
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(loss.double(), expected, rtol=4e-6, atol=1e-30)
    # where the cotangents of a row cancel, what is left is no better than their own rounding
    allowed = 2e-6 * expected_gradient.abs().amax(-1, keepdim=True) + 8 * eps * cotangent
    assert ((gradient.double() - expected_gradient).abs() <= allowed).all()


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(3, 1), (7, 3), (60, 5), (300, 20)])
def test_the_table_s_expectation_and_gradient(form, n, k, impl):
    for tau in (1e-3, 0.1, 1.0, 10.0):
        s = torch.cat([scores(kind, n, rows=2) for kind in KINDS])
        target = target_of(form, len(s), n)
        expected, gradient = by_table(s, target, k, tau, 1.0)
        loss, g = found(s, target, k, tau=tau, impl=impl)
        assert_exact(loss, g, expected, gradient, 1 / k)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("k", [4, 15])
def test_gaps_weights_and_reductions(form, reduction, k, impl):
    """Also for k above n / 2, where the n - k smallest are drawn instead."""
    s, alpha, weight = scores("gaussian", 20, rows=9), torch.linspace(0, 2, 20), torch.linspace(0.5, 3, 20)
    target = target_of(form, 9, 20)
    options = {"alpha": alpha, "weight": weight, "reduction": reduction}
    expected, gradient = by_table(s, target, k, 0.3, **options)
    loss, g = found(s, target, k, tau=0.3, impl=impl, **options)
    torch.testing.assert_close(loss.double(), expected, rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(g.double(), gradient, rtol=4e-6, atol=1e-6)
    doubled = found(s, target, k, tau=0.3, impl=impl, alpha=alpha, weight=weight * 2, reduction=reduction)[1]
    of_labels = isinstance(target, Tensor) and not target.is_floating_point()
    torch.testing.assert_close(doubled, g * (1 if of_labels and reduction == "mean" else 2), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("form", ["labels", "smoothed"])
def test_large_k_is_computed_in_double_precision(form, impl):
    s, weight = scores("gaussian", 150, rows=2), torch.linspace(0.5, 3, 150)
    target, options = target_of(form, 2, 150), {"weight": weight, "reduction": "mean"}
    expected, gradient = by_table(s, target, 70, 0.3, 1.0, **options)
    loss, g = found(s, target, 70, tau=0.3, impl=impl, **options)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=4e-6, atol=0.0)
    torch.testing.assert_close(g.double(), gradient, rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    s, target = scores("gaussian", 9, rows=3).double().requires_grad_(), target_of(form, 3, 9)
    for reduction in ("none", "mean"):
        assert torch.autograd.gradcheck(
            lambda x, reduction=reduction: smooth_topk_hinge(x, target, 3, tau=0.4, reduction=reduction), s
        )


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("form", FORMS)
def test_rows_with_nan_and_excluded_classes(form, impl):
    s, target = scores("gaussian", 30, rows=4), target_of(form, 4, 30)
    clean = found(s, target, 3, impl=impl)
    s[1, 7] = NAN
    loss, gradient = found(s, target, 3, impl=impl)
    assert loss[1].isnan()
    assert gradient[1].isnan().any()
    for one, other in zip((loss, gradient), clean, strict=True):
        torch.testing.assert_close(one[[0, 2, 3]], other[[0, 2, 3]], rtol=1e-6, atol=1e-7)
    s = scores("gaussian", 30, rows=4)
    s[:, 5] = -INF
    q = dense(target, 30)
    q[:, 5] = 0.0
    loss, gradient = found(s, q.float(), 3, impl=impl)
    rest = [i for i in range(30) if i != 5]
    expected, of_rest = by_table(s[:, rest], q[:, rest], 3, 1.0, 1.0)
    torch.testing.assert_close(loss.double(), expected, rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(gradient[:, rest].double(), of_rest, rtol=4e-6, atol=1e-6)
    assert (gradient[:, 5] == 0).all()


@pytest.mark.parametrize("impl", ON_CPU)
def test_rows_of_no_mass_cost_nothing(impl):
    s = scores("gaussian", 30, rows=3)
    target = LabelMixture.smoothed(torch.tensor([3, 0, 29]), 0.1).scaled(torch.tensor([1.0, 0.0, 0.5]))
    loss, gradient = found(s, target, 4, impl=impl)
    whole, of_whole = found(s, LabelMixture.smoothed(target.labels[:, 0], 0.1), 4, impl=impl)
    assert loss[1] == 0
    assert (gradient[1] == 0).all()
    torch.testing.assert_close(loss[2], whole[2] / 2)
    torch.testing.assert_close(gradient[2], of_whole[2] / 2)


def test_a_target_that_asks_for_its_gradient_gets_the_table():
    s, q = scores("gaussian", 12, rows=2), torch.full((2, 12), 1 / 12, requires_grad=True)
    smooth_topk_hinge(s, q, 3, tau=0.5).sum().backward()
    table = soft_hinge(1 - topk_margins(s, 3, temperature=1.5) / 3, 0.5)
    torch.testing.assert_close(q.grad, table)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_compiled_and_functional_gradients_are_the_same(form):
    s, target = scores("gaussian", 12, rows=4), target_of(form, 4, 12)

    def loss(x):
        return smooth_topk_hinge(x, target, 3, tau=0.3, reduction="mean")

    expected, gradient = found(s, target, 3, tau=0.3, reduction="mean")
    torch.testing.assert_close(torch.func.grad(loss)(s), gradient, rtol=1e-6, atol=1e-8)
    x = s.clone().requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
    compiled.backward()
    torch.testing.assert_close(compiled.detach(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-5, atol=1e-7)


def test_the_gradient_is_kept_for_a_second_backward_pass():
    x = scores("gaussian", 12, rows=2).requires_grad_()
    loss = smooth_topk_hinge(x, torch.tensor([0, 5]), 3, reduction="mean")
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(x.grad, 3 * once)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            torch.zeros(2, 4),
            r"class indices \(int64, \[2\]\) or a distribution .*\[2, 5\]\), got torch.float32 \[2, 4\]",
        ),
        (torch.zeros(2, dtype=torch.int32), r"got torch.int32 \[2\]"),
        (LabelMixture.smoothed(torch.tensor([0, 5]), 0.1), r"labels of a LabelMixture must be in \[0, 4\], got 5"),
        (LabelMixture.smoothed(torch.tensor([0]), 0.1), r"expected labels int64 \[2, m\]"),
        (torch.tensor([0, -1]), r"target must be in \[0, 4\], got -1"),
    ],
)
def test_bad_targets_are_told_what_is_wrong(target, message):
    with pytest.raises(ValueError, match=message):
        smooth_topk_hinge(torch.zeros(2, 5), target, 2, reduction="mean")
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'mean', 'sum', got 'all'"):
        smooth_topk_hinge(torch.zeros(2, 5), torch.tensor([0, 1]), 2, reduction="all")


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(7, 2), (7, 5), (7, 6), (80, 70)])
def test_a_gradient_that_is_differentiated_is_the_gradient(n, k, form, reduction, impl):
    """Above n / 2 kernels see the negative scores, and so does what is differentiated in their place."""
    s = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(k)).requires_grad_()
    direction, target = s.detach().roll(1, 0).cos(), target_of(form, 3, n)

    def gradient(x: Tensor, create_graph: bool = False) -> Tensor:
        loss = smooth_topk_hinge(x, target, k, tau=0.5, reduction=reduction, impl=impl)
        return torch.autograd.grad(loss.sum(), x, create_graph=create_graph)[0]

    first = gradient(s, create_graph=True)
    torch.testing.assert_close(first, gradient(s), rtol=1e-9, atol=1e-12)
    (second,) = torch.autograd.grad((first * direction).sum(), s)
    h = 1e-5
    above, below = (gradient((s.detach() + step * direction).requires_grad_()) for step in (h, -h))
    torch.testing.assert_close(second, (above - below) / (2 * h), rtol=1e-5, atol=1e-8)
    single = s.detach().float().requires_grad_()  # kernels may compute in double precision
    torch.testing.assert_close(gradient(single, create_graph=True), gradient(single), rtol=1e-4, atol=1e-6)
