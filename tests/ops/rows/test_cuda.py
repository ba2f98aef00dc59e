"""What is peculiar to row kernels for GPUs: tiles, memory, curves; on a GPU or under Triton's interpreter."""

import math
from functools import partial

import pytest
import torch

import topk_registry as tr
from tests.ops.families import FAMILIES
from tests.ops.triton_runs import DEVICE, Launches, compiles, interprets, pass_under_the_interpreter, runs_kernels
from topk_registry import LabelMixture
from topk_registry.ops.targets.masses import REDUCTIONS
from topk_registry.rows import Curve, RowLoss, row_losses, softmax_rows

pytest.importorskip("triton")

from tests.ops.kernels import (
    EPS,
    MIXTURES,
    TARGETS,
    N,
    assert_agree,
    by_definition,
    by_kernel,
    mixture_of,
    scores,
    target_of,
)
from topk_registry.ops.gpu import layout
from topk_registry.ops.rows import autograd
from topk_registry.ops.rows.triton.curves import UnsupportedCurveError, compiled
from topk_registry.ops.rows.triton.scale import scale

# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHORT = {"held": (30, 8), "long": (61, 8)}  # classes, and the scores of a tile: 4 tiles in registers, 8 read again


LOSSES = {name: family.build for name, family in FAMILIES.items()}


@runs_kernels
@pytest.mark.parametrize("form", SHORT)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("scaled and shifted", "labels"),
        ("cross-entropy", "distribution"),
        ("with others", "labels"),
        ("a margin a class", "smoothed"),
        ("the best class", "smoothed"),
        ("the best classes", "labels"),
        ("the best classes", "distribution"),
        ("sigmoid", "smoothed"),
        ("squares", "labels"),
        ("squares", "distribution"),
        ("bound", "labels"),
        ("soft top-k", "labels"),
        ("soft top-k", "distribution"),
    ],
)
def test_rows_in_tiles(form, name, kind, monkeypatch):
    n, tile = SHORT[form]
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", tile)
    s, loss = scores(n)[:4], LOSSES[name](n)
    target = target_of(kind, s)
    assert_agree(by_kernel(loss, s, target, **TARGETS[kind]), by_definition(loss, s, target, **TARGETS[kind]), s)


@runs_kernels
@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [
        ("cross-entropy", "mixed", None),
        ("cross-entropy", "mixed and smoothed", "held"),
        ("scaled and shifted", "a share each", None),
        ("with others", "mixed", None),
        ("a margin a class", "mixed and smoothed", None),
        ("focal", "mixed", "long"),
        ("the best classes", "mixed and smoothed", "long"),
        ("sigmoid", "mixed", "held"),
        ("sigmoid with logarithms", "mixed and smoothed", None),
        ("squares", "mixed", None),
        ("squares", "a share each", "long"),
        ("bound", "mixed and smoothed", None),
        ("bound", "a share each", "held"),
    ],
)
def test_labels_with_shares(name, kind, form, monkeypatch):
    n, tile = SHORT[form] if form else (N, layout.TILE_OF_A_WARP)
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", tile)
    s, loss = scores(n)[: 4 if form else 5], LOSSES[name](n)
    s[1, 7] = torch.nan  # of the row without mass, which is not read
    target, options = mixture_of(kind, s), MIXTURES[kind]
    value, gradient = by_kernel(loss, s, target, **options)
    assert (gradient[1] == 0).all()
    s[1, 7] = 0.0
    assert_agree((value, gradient), by_definition(loss, s, target, **options), s)


@runs_kernels
@pytest.mark.parametrize(("name", "tile"), [("cross-entropy", 256), ("focal", 8), ("sigmoid", 256), ("squares", 8)])
def test_a_mixture_of_labels_that_are_no_classes(name, tile, monkeypatch):
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", tile)
    s = scores()[:4]
    label = torch.tensor([0, N, 7, 3], device=DEVICE)
    for target in (
        LabelMixture.mixed(torch.zeros_like(label), label, 0.7),
        LabelMixture(label[:, None], label[:, None].double()),
    ):
        value, gradient = by_kernel(LOSSES[name](N), s, target)
        assert value.isnan().tolist() == gradient.isnan().all(1).tolist() == [False, True, False, False]


@runs_kernels
@pytest.mark.parametrize("tile", [256, 8])
@pytest.mark.parametrize("name", ["cross-entropy", "squares"])
def test_rows_that_are_a_part_of_longer_ones(name, tile, monkeypatch):
    """They are read where they lie, whether rows begin where tiles do or not."""
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", tile)
    loss, target = LOSSES[name](N), target_of("labels", scores()[:4])
    for longer in (N + 1, N + 2) if tile == 8 else (N + 6,):
        whole = torch.full((4, longer), torch.nan, device=DEVICE)
        s = whole[:, :N].copy_(scores()[:4])
        memory, stride = layout.in_rows(s)
        assert (memory.data_ptr(), stride) == (whole.data_ptr(), longer)
        value, gradient = by_kernel(loss, s, target)
        assert gradient.shape == s.shape
        torch.testing.assert_close((value, gradient), by_kernel(loss, s.contiguous(), target), rtol=1e-6, atol=1e-6)


@runs_kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_from_logits_to_the_gradient(reduction, monkeypatch):
    """As a module has it, with the factor of the mean multiplied in the backward pass; without a gradient too."""
    monkeypatch.setattr(RowLoss, "kernel_for", lambda loss, scores: partial(loss.on_gpu().run, loss.own))
    s, target = scores()[:4].requires_grad_(), target_of("labels", scores()[:4])
    builder = tr.get_loss_builder("focal")
    loss = builder(reduction=reduction)
    value = loss(s, target)
    weights = torch.linspace(0.5, 2, value.numel(), device=DEVICE).view(value.shape)
    (gradient,) = torch.autograd.grad((value * weights).sum(), s)
    leaf = s.detach().double().requires_grad_()
    wanted = loss._definition(leaf, target, None)
    (exact,) = torch.autograd.grad((wanted * weights).sum(), leaf)
    assert_agree((value.detach(), gradient), (wanted.detach(), exact), s.detach())
    with torch.no_grad():
        assert torch.equal(loss(s, target), value)
    (again,) = torch.autograd.grad(loss(s, target).sum(), s, create_graph=True)
    torch.autograd.grad(again.square().sum(), s)  # a second derivative comes from the definition
    if reduction == "none":  # where rows begin decides how they are read, and so the order of their sums
        assert torch.equal(row_losses(loss.row_loss(s), s.detach()[1:].clone(), target[1:]), value.detach()[1:])


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 6000])
def test_a_gradient_is_multiplied_in_place(count, dtype):
    for g, left in ((1.0, None), (0.3, None), (2.0, 0.5), (3.0, 0.25), (torch.nan, None)):
        x = torch.linspace(-3, 5, count, device=DEVICE).to(dtype)
        wanted = x.float() * (g if left is None else g * left)
        scale(x, torch.tensor(g, device=DEVICE), None if left is None else torch.tensor(left, device=DEVICE))
        rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps  # the interpreter cuts digits off
        torch.testing.assert_close(x, wanted.to(dtype), rtol=rounding, atol=0, equal_nan=True)


@runs_kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_passes_after_the_first(reduction, monkeypatch):
    """The first one takes the memory that the forward pass has written; the others find none there."""
    monkeypatch.setattr(autograd, "in_place", lambda gradient, dtype: gradient.dtype == dtype)
    monkeypatch.setattr(RowLoss, "kernel_for", lambda loss, scores: partial(loss.on_gpu().run, loss.own))
    s = scores()[:4].requires_grad_()
    target = target_of("labels", s)
    value = tr.get_loss_builder("focal")(reduction=reduction)(s, target)
    weights = torch.linspace(0.5, 2, value.numel(), device=DEVICE).view(value.shape)
    gradients = [torch.autograd.grad(value, s, g * weights, retain_graph=True)[0] for g in (3.0, 1.0, 1.0, 0.5)]
    for g, gradient in zip((3.0, 1.0, 0.5), (gradients[0], *gradients[2:]), strict=True):
        torch.testing.assert_close(gradient, g * gradients[1], rtol=2 * EPS, atol=0)
    assert len({gradient.data_ptr() for gradient in gradients}) == len(gradients)
    many = torch.autograd.grad(value, s, torch.stack((weights, 2 * weights)), retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close(many[0][1], 2 * gradients[1], rtol=2 * EPS, atol=0)
    (value * weights).sum().backward()
    torch.testing.assert_close(s.grad, gradients[1], rtol=2 * EPS, atol=0)


def _falls(log_p, log_not, p, not_p, own, numbers):
    """Branches of every kind."""
    x = abs(log_p - log_not) * GAIN
    if x > 1.0 and not p < 0.25:
        y = x - 1.0
        y *= 2.0
    elif p < 0.1 or 0.2 < p <= 0.22:
        y = min(x, 3.0)
    else:
        y = 0.0 * p
    low, high = (x, y) if x < y else (y, x)
    return low + math.fabs(high) + y, max(x, y)


GAIN = 2


def _with_a_loop(log_p, log_not, p, not_p, own, numbers):
    for _ in range(3):
        p = p * p
    return p, p


def _with_an_early_return(log_p, log_not, p, not_p, own, numbers):
    if p > 0.5:
        return p, p
    return log_p, p


def _with_a_power(log_p, log_not, p, not_p, own, numbers):
    return p**2.0, p


@pytest.mark.parametrize(
    ("curve", "what"),
    [(_with_a_loop, "for _ in"), (_with_an_early_return, "return (p, p)"), (_with_a_power, "p ** 2.0")],
)
def test_a_curve_without_a_form_for_gpus(curve, what):
    with pytest.raises(UnsupportedCurveError, match=curve.__name__) as error:
        compiled(curve)
    assert what in str(error.value)
    loss = softmax_rows(Curve(lambda log_p, log_not, own: -log_p, curve))
    assert loss.on_gpu is not None
    assert loss.on_gpu() is None


@runs_kernels
def test_branches_of_a_curve_are_choices():
    s = torch.linspace(-4, 4, 33, device=DEVICE)[:, None] * torch.tensor([1.0, 0.0], device=DEVICE)
    label = torch.zeros(33, dtype=torch.long, device=DEVICE)
    value, gradient = by_kernel(softmax_rows(Curve(lambda log_p, log_not, own: -log_p, _falls)), s, label)
    for row, log_odds in enumerate(s[:, 0].tolist()):
        p = 1 / (1 + math.exp(-log_odds))
        on, slope = _falls(math.log(p), math.log1p(-p), p, 1 - p, 0.0, ())
        assert value[row].item() == pytest.approx(on, rel=1e-5, abs=1e-5)
        assert gradient[row, 0].item() == pytest.approx(slope, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@interprets
def test_under_the_interpreter():
    pass_under_the_interpreter(__file__)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "n", "dtype", "capability"),
    [
        ("cross-entropy", "labels", 1000, torch.bfloat16, 80),
        ("with others", "distribution", 1000, torch.bfloat16, 90),
        ("a margin a class", "smoothed", 21_841, torch.float16, 80),
        ("the best class", "smoothed", 21_841, torch.bfloat16, 80),
        ("the best classes", "distribution", 1000, torch.float32, 90),
        ("sigmoid with logarithms", "labels", 100, torch.float32, 90),
        ("cross-entropy", "mixed", 1000, torch.bfloat16, 80),
        ("squares", "mixed", 21_841, torch.float16, 80),
        ("squares", "smoothed", 1_000_000, torch.bfloat16, 90),
        ("bound", "distribution", 1001, torch.float32, 80),
        ("soft top-k", "labels", 1000, torch.bfloat16, 90),
        ("soft top-k", "mixed and smoothed", 21_841, torch.float16, 80),
    ],
)
def test_compiles_for_gpus_and_stays_in_registers(name, kind, n, dtype, capability, monkeypatch, tmp_path):
    launches = Launches(monkeypatch)
    s = torch.zeros(2, n, dtype=dtype)
    target = torch.zeros(2, n) if kind == "distribution" else torch.zeros(2, dtype=torch.long)
    if kind in MIXTURES:
        target = LabelMixture.mixed(target, target, 0.7, 0.1 if kind == "mixed and smoothed" else 0.0)
    by_kernel(LOSSES[name](n), s, target, **{**TARGETS, **MIXTURES}[kind])
    for kernel in launches.compiled(capability, tmp_path):
        assert kernel.stack <= 32, kernel  # bytes a thread; some of ptxas' releases spill a number or two
