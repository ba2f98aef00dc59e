"""Fused losses are their definitions: values and gradients, whatever the target, the options and the precision."""

from itertools import product

import pytest
import torch
from torch import Tensor

import topk_registry as tr
from tests.losses.fused import CASES, B, N, batch, build
from topk_registry.ops.tensors import readable

SETTINGS = list(product(("none", "mean", "sum"), (0.0, 0.1), (False, True), ("index", "dense")))


def mixture(kind: str) -> tr.LabelMixture:
    """Labels with shares; the first row's are the same label, the third has no mass."""
    generator = torch.Generator().manual_seed(7)
    label, lam = torch.randint(N, (B,), generator=generator), torch.linspace(0, 1, B)
    if kind == "a share each":
        found = tr.LabelMixture(label[:, None], 1 + lam[:, None])
    else:
        other = label.roll(1)
        other[0] = label[0]
        found = tr.LabelMixture.mixed(label, other, lam, 0.1 if kind == "mixed and smoothed" else 0.0)
    return found.scaled((torch.arange(B) != 2).double())


def both(loss, logits: Tensor, target: Tensor | tr.LabelMixture) -> list[tuple[Tensor, Tensor]]:
    """Value and gradient by the kernel, and by the definition."""
    assert readable(logits, target)
    found = []
    for call in (loss, lambda s, t: loss._definition(s, t, None)):
        leaf = logits.detach().clone().requires_grad_()
        value = call(leaf, target)
        found.append(
            (value.detach(), torch.autograd.grad((value * torch.linspace(0.5, 1, value.numel())).sum(), leaf)[0])
        )
    return found


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_target_and_option(name, options):
    weight = torch.linspace(0, 2, N)
    for reduction, smoothing, weighted, kind in SETTINGS:
        common = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight if weighted else None}
        loss = build(name, **options, **common)
        logits, target = batch(kind)
        if kind == "index":
            target[2] = -100
        got, wanted = both(loss, logits, target)
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)


MIXTURES = {
    "mixed": {"reduction": "none"},
    "mixed and smoothed": {"reduction": "mean", "weight": torch.linspace(0, 2, N), "label_smoothing": 0.2},
    "a share each": {"reduction": "sum", "weight": torch.linspace(0, 2, N)},
}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_labels_with_shares(name, options):
    logits, _ = batch("index")
    for kind, common in MIXTURES.items():
        loss, target = build(name, **options, **common), mixture(kind)
        got, wanted = both(loss, logits, target)
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)
        # smoothing of a row without mass is none, where that of a distribution makes some
        written = target.smooth(loss.label_smoothing).dense(N, torch.float64)
        loss.label_smoothing = 0.0
        torch.testing.assert_close(got, both(loss, logits, written)[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["focal", "sigmoid_mse", "spherical_bound", "smooth_topk_svm", "topk_hinge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_labels_with_shares_in_lower_precision(name, dtype):
    """As with the distribution written out: shares are kept in double precision, a distribution in single."""
    logits, _ = batch("index", dtype)
    for kind in MIXTURES:
        loss, target = build(name, reduction="none"), mixture(kind)
        (value, gradient), _ = both(loss, logits, target)
        (wanted, exact), _ = both(loss, logits, target.dense(N, torch.float32))
        assert (value.dtype, gradient.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("name", ["focal", "topk_hinge_convex", "smooth_topk_svm"])
def test_shares_in_any_memory(name):
    loss, (logits, _), target = build(name), batch("index"), mixture("mixed and smoothed")
    wanted = loss(logits, target)
    labels, shares, uniform = target
    assert uniform is not None
    strange = tr.LabelMixture(labels.t().contiguous().t(), shares.repeat(1, 2)[:, :2], uniform.repeat(2, 1).t()[:, 0])
    assert torch.equal(loss(logits, strange), wanted)
    single = tr.LabelMixture(labels, shares.float(), uniform.float())
    torch.testing.assert_close(loss(logits, single), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(loss(logits, target.to("cpu")), wanted)


def test_a_row_without_mass_is_not_read():
    logits, _ = batch("index")
    logits[2] = torch.nan
    for name in ("focal", "sigmoid_mae", "log_taylor_softmax", "topk_svm"):
        leaf = logits.clone().requires_grad_()
        value = build(name, reduction="none")(leaf, mixture("mixed"))
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        assert value[2] == 0
        assert (gradient[2] == 0).all()


def test_the_gradient_of_shares_is_the_definition_s():
    logits, _ = batch("index")
    lam = torch.linspace(0, 1, B, dtype=torch.float64, requires_grad=True)
    label = torch.arange(B)
    loss = build("focal", reduction="sum")
    (gradient,) = torch.autograd.grad(loss(logits, tr.LabelMixture.mixed(label, label + 1, lam)), lam)
    ends = [build("focal", reduction="none")(logits, label + i) for i in range(2)]
    torch.testing.assert_close(gradient, ends[0] - ends[1])


def test_transforms_take_shares():
    logits, _ = batch("index")
    loss, target = build("focal"), mixture("mixed and smoothed")
    found = torch.func.grad(lambda s: loss(s, target))(logits)
    leaf = logits.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(loss(leaf, target), leaf)[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["focal", "smooth_topk_svm", "topk_svm"])
def test_bad_mixtures_are_named(name):
    loss, (logits, _), (labels, shares, uniform) = build(name), batch("index"), mixture("mixed and smoothed")
    for wrong, message in (
        (tr.LabelMixture(labels + N, shares), rf"labels of a LabelMixture must be in \[0, {N - 1}\], got"),
        (tr.LabelMixture(labels[:2], shares[:2]), rf"expected labels int64 \[{B}, m\], m > 0, shares .* got"),
        (tr.LabelMixture(labels, shares[:, :1]), r"shares \[6, m\] .* torch.float64 \[6, 1\]"),
        (tr.LabelMixture(labels[:, :0], shares[:, :0]), r"m > 0"),
        (tr.LabelMixture(labels, shares, shares), r"uniform \[6\] or None, got .* \[6, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(logits, wrong)
    with pytest.raises(ValueError, match=r"logits must be .* got torch.float64 \[6, 41, 1\]"):
        loss(logits[..., None], tr.LabelMixture(labels, shares, uniform))


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_computed_in_single(name, options, dtype):
    """Against double precision on the same scores: as close as single precision allows, rounded once."""
    # exact in bfloat16, without ties (there the choice of classes is free), and no hinge at its kink
    spread = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(b)) for b in range(B)])
    for kind, step in product(("index", "dense"), (5 / 32, 5.0)):
        logits, target = (spread * step).to(dtype), batch(kind, dtype)[1]
        loss = build(name, **options)
        (value, gradient), _ = both(loss, logits, target)
        exact = both(loss, logits.double(), target.double() if kind == "dense" else target)[1]
        assert value.dtype == torch.float32
        assert gradient.dtype == dtype
        torch.testing.assert_close(value.double(), exact[0], rtol=1e-5, atol=1e-5)
        # exp of differences up to 600 (ldam scales them by 3): 600 eps = 4e-5 of a probability at worst
        close = 2e-5 * exact[1].abs().max().item()
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-4 + rounding, atol=close + 6e-8)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_second_derivative_is_the_definition_s(name, options):
    logits, target = batch("index", scale=1.0)
    loss = build(name, **options)
    found = []
    for call in (loss, lambda s, t: loss._definition(s, t, None)):
        leaf = logits.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(leaf, target), leaf, create_graph=True)
        direction = torch.linspace(-1, 1, N, dtype=torch.float64)
        second = (
            torch.autograd.grad((first * direction).sum(), leaf, allow_unused=True, materialize_grads=True)[0]
            if first.requires_grad
            else torch.zeros_like(leaf)
        )
        found.append((first.detach(), second))
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_row_with_nan_spoils_no_other_and_hidden_classes_cost_nothing(name, options):
    logits, target = batch("index")
    loss = build(name, **options, reduction="none")
    wanted = loss(logits, target)
    logits[3, 5] = torch.nan
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    kept = torch.arange(B) != 3
    assert value[3].isnan()
    assert gradient[3].isnan().any()
    torch.testing.assert_close(value[kept], wanted[kept], rtol=0, atol=0)
    assert gradient[kept].isfinite().all()


@pytest.mark.parametrize("name", ["focal", "sigmoid_mse", "topk_hinge", "log_taylor_softmax"])
def test_strange_memory(name):
    """Sliced, expanded, reversed and transposed logits and targets, and integers of other sizes."""
    logits, target = batch("index")
    loss = build(name)
    wanted = loss(logits, target)
    transposed, sliced = logits.t().contiguous().t(), torch.stack([logits, -logits], 2)[..., 0]
    rows = torch.cat([logits, logits])[: 2 * B : 1][B:]
    for strange in (transposed, sliced, rows, torch.stack([logits, logits], 1)[:, 0]):
        assert torch.equal(loss(strange, target), wanted)
    for strange in (
        torch.stack([target, -target], 1)[:, 0],
        target.flip(0).flip(0),
        target.int(),
        target.to(torch.uint8),
    ):
        assert torch.equal(loss(logits, strange), wanted)
    one = torch.full((1,), 3).expand(B)
    assert torch.equal(loss(logits, one), loss(logits, one.contiguous()))


def test_an_index_out_of_range_is_named():
    logits, target = batch("index")
    target[4] = N
    with pytest.raises(ValueError, match=rf"target must be in \[0, {N - 1}\] \(or ignore_index = -100\), got {N}"):
        build("focal")(logits, target)


def test_the_gradient_can_be_asked_for_twice():
    logits, target = batch("index")
    leaf = logits.requires_grad_()
    value = build("focal")(leaf, target)
    value.backward(retain_graph=True)
    assert leaf.grad is not None
    first = leaf.grad.clone()
    value.backward()
    torch.testing.assert_close(leaf.grad, 2 * first, rtol=0, atol=0)


def test_a_loss_scaler_finds_small_gradients_of_float16():
    """Of 4096 classes at a batch of 64 they are near 1e-6 before the factor, where float16 has two digits."""
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    target = torch.arange(64)
    (got,) = torch.autograd.grad(build_any("focal", 4096)(logits, target) * 1024, logits)
    wide = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(build_any("focal", 4096)(wide, target) * 1024, wide)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=6e-8)


def build_any(name: str, n: int) -> torch.nn.Module:
    return tr.create_loss(name)


def test_threads_change_no_bit():
    logits, target = (torch.randn(64, 2000), torch.arange(64))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            leaf = logits.clone().requires_grad_()
            value = tr.create_loss("focal", label_smoothing=0.1)(leaf, target)
            value.backward()
            found.append((value.detach(), leaf.grad))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
