"""The top-k hinges' kernel for GPUs: the definition's results, on a GPU or under Triton's interpreter."""

from functools import partial

import pytest
import torch

from tests.ops.triton_runs import DEVICE, Launches, compiles, interprets, pass_under_the_interpreter, runs_kernels
from topk_registry import LabelMixture, create_loss
from topk_registry.rows import RowLoss, topk_hinge_rows

pytest.importorskip("triton")

from tests.ops.gpu_rows import (
    MIXTURES,
    TARGETS,
    assert_agree,
    by_definition,
    by_kernel,
    mixture_of,
    scores,
    target_of,
)
from topk_registry.ops.gpu import layout

# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
N = 30
LOSSES = {
    "rival": lambda n: topk_hinge_rows(4),
    "rival with gaps": lambda n: topk_hinge_rows(3, alpha=torch.linspace(0, 2, n), factor=1 / 3),
    "rank": lambda n: topk_hinge_rows(5, against="rank"),
    "mean": lambda n: topk_hinge_rows(4, against="mean"),
    "mean of one": lambda n: topk_hinge_rows(1, against="mean"),
}
FORMS = {"rows together": (N, 256), "held": (30, 8), "long": (45, 8)}  # classes, and the scores of a tile
KINDS = {**TARGETS, **MIXTURES}
CASES = [(name, "rows together", kind) for name in LOSSES for kind in KINDS]
CASES += [("rival", "held", "labels"), ("mean", "held", "mixed"), ("rank", "held", "distribution")]
CASES += [("rival with gaps", "long", "smoothed"), ("mean", "long", "labels"), ("mean", "long", "distribution")]


def row_scores(n: int) -> torch.Tensor:
    """Rows without ties, between which a gradient may choose: gaussian, nearly equal, of a leader, with an outlier."""
    return scores(n)[[0, 2, 3, 4]]


def target_for(kind: str, s: torch.Tensor) -> torch.Tensor | LabelMixture:
    return mixture_of(kind, s) if kind in MIXTURES else target_of(kind, s)


@runs_kernels
@pytest.mark.parametrize(("name", "form", "kind"), CASES)
def test_agree_with_the_definition(name, form, kind, monkeypatch):
    n, tile = FORMS[form]
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", tile)
    s, loss, options = row_scores(n), LOSSES[name](n), KINDS[kind]
    target = target_for(kind, s)
    assert_agree(by_kernel(loss, s, target, **options), by_definition(loss, s, target, **options), s)


@runs_kernels
@pytest.mark.parametrize("kind", ["labels", "distribution"])
@pytest.mark.parametrize("name", LOSSES)
def test_ties_have_the_value_and_a_gradient_of_one_of_their_orders(name, kind):
    """Equal scores come in the order of their classes: as scores do that are lowered by so little, in double."""
    s, loss = scores()[1:2], LOSSES[name](N)
    target = target_of(kind, scores())[1:2]
    value, gradient = by_kernel(loss, s, target)
    exact, _ = by_definition(loss, s, target)
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)
    first_first = s.double() - 1e-9 * torch.arange(N, device=DEVICE)  # equal scores in the order of classes
    _, wanted = by_definition(loss, first_first, target)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-6)


@runs_kernels
@pytest.mark.parametrize(("name", "tile"), [("rival", 256), ("rank", 256), ("mean", 256), ("rival with gaps", 8)])
def test_rows_that_are_ignored_or_no_numbers(name, tile, monkeypatch):
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", tile)
    s, loss = scores()[:5], LOSSES[name](N)
    s[1, 3], s[2, 7], s[0, 9] = torch.nan, torch.nan, -torch.inf
    label = torch.tensor([0, -100, 7, N, 3], device=DEVICE)  # N is no class
    other = torch.tensor([0, 1, 7, N, 3], device=DEVICE)
    for target, bad in (
        (label, [2, 3]),
        (s.nan_to_num(neginf=0).softmax(-1), [1, 2]),
        (mixture_of("mixed", s)._replace(labels=torch.stack((other * 0, other), 1)), [2, 3]),
    ):
        value, gradient = by_kernel(loss, s, target)
        assert value.isnan().tolist() == gradient.isnan().all(1).tolist() == [row in bad for row in range(5)]
        assert gradient[[row for row in range(5) if row not in bad]].isfinite().all()
    value, gradient = by_kernel(loss, s, label)
    assert value[1] == 0
    assert (gradient[1] == 0).all()


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype):
    s, loss = row_scores(N).to(dtype), LOSSES["mean"](N)
    target = target_of("labels", s)
    value, gradient = by_kernel(loss, s, target)
    wanted, wide = by_kernel(loss, s.float(), target)
    assert torch.equal(value, wanted)
    assert gradient.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    torch.testing.assert_close(gradient, wide.to(gradient.dtype))


@runs_kernels
def test_modules_come_to_the_kernel(monkeypatch):
    monkeypatch.setattr(RowLoss, "kernel_for", lambda loss, scores: partial(loss.on_gpu().run, loss.own))
    s, label = row_scores(N).requires_grad_(), target_of("labels", row_scores(N))
    for name in ("topk_svm", "topk_hinge", "topk_hinge_convex", "topk_hinge_calibrated"):
        loss = create_loss(name, k=3, label_smoothing=0.1)
        (found,) = torch.autograd.grad(loss(s, label), s)
        (wanted,) = torch.autograd.grad(loss._definition(s, label, None), s)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_large_k_is_left_to_torch():
    for k in (64, 65):
        on_gpu = topk_hinge_rows(k).on_gpu
        assert on_gpu is not None
        assert (on_gpu() is None) == (k > 64)


@pytest.mark.slow
@interprets
def test_under_the_interpreter():
    pass_under_the_interpreter(__file__)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "n", "dtype", "capability"),
    [
        ("rival with gaps", "labels", 1000, torch.bfloat16, 80),
        ("mean", "labels", 21_841, torch.float16, 90),
        ("mean", "distribution", 1001, torch.bfloat16, 90),
    ],
)
def test_compiles_for_gpus_and_stays_in_registers(name, kind, n, dtype, capability, monkeypatch, tmp_path):
    launches = Launches(monkeypatch)
    target = torch.zeros(2, n) if kind == "distribution" else torch.zeros(2, dtype=torch.long)
    by_kernel(LOSSES[name](n), torch.zeros(2, n, dtype=dtype), target, **TARGETS[kind])
    for kernel in launches.compiled(capability, tmp_path):
        assert kernel.stack == 0, kernel  # bytes a thread
