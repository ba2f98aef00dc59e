"""What is peculiar to the top-k hinges: ties, tiles in registers, large k; on a GPU or under Triton's interpreter."""

from functools import partial

import pytest
import torch

from tests.ops.families import FAMILIES
from tests.ops.triton_runs import DEVICE, Launches, compiles, interprets, pass_under_the_interpreter, runs_kernels
from topk_registry import create_loss
from topk_registry.rows import RowLoss, topk_hinge_rows

pytest.importorskip("triton")

from tests.ops.kernels import (
    MIXTURES,
    TARGETS,
    assert_agree,
    by_definition,
    by_kernel,
    scores,
    target_for,
    target_of,
)
from topk_registry.ops.gpu import layout

# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
N = 30
LOSSES = {name: FAMILIES[name].build for name in ("rival", "rival with gaps", "rank", "mean", "mean of one")}
FORMS = {"held": (30, 8), "long": (45, 8)}  # classes, and the scores of a tile
KINDS = {**TARGETS, **MIXTURES}
CASES = [("rival", "held", "labels"), ("mean", "held", "mixed"), ("rank", "held", "distribution")]
CASES += [("rival with gaps", "long", "smoothed"), ("mean", "long", "labels"), ("mean", "long", "distribution")]


def row_scores(n: int) -> torch.Tensor:
    """Rows without ties, between which a gradient may choose: gaussian, nearly equal, of a leader, with an outlier."""
    return scores(n)[[0, 2, 3, 4]]


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
