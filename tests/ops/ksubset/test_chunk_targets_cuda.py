"""Distributions as targets of classes in chunks, by Triton kernels: on a GPU or under Triton's interpreter."""

from typing import Any

import pytest
import torch

from tests.bench.instructions import launch_targets
from tests.ops.triton_runs import DEVICE, Launches, compiles, interprets, pass_under_the_interpreter, runs_kernels
from topk_registry import LabelMixture
from topk_registry.functional import linear_smooth_topk
from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.ksubset.chunked import layer

pytest.importorskip("triton")

from topk_registry.ops.ksubset.triton import chunks

# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture
def chunks_in_kernels(monkeypatch):
    layer.kernels(torch.empty(0, device=DEVICE), 2)  # a backend is tried with the kernels of each device
    monkeypatch.setattr(layer, "module_of", lambda backend, k: chunks)
    monkeypatch.setattr(chunks, "TILE_OF_TARGETS", 16)


@runs_kernels
@pytest.mark.usefixtures("chunks_in_kernels")
@pytest.mark.parametrize(
    ("form", "k", "tau", "options"),
    [
        ("distribution", 1, 0.5, {"reduction": "none"}),
        ("distribution", 5, 0.1, {"class_weight": True, "reduction": "mean"}),
        ("smoothing", 3, 1.0, {"class_weight": True, "alpha": True, "reduction": "sum"}),
        ("mixup", 2, 0.3, {"alpha": True, "reduction": "none"}),
        ("mixup and smoothing", 7, 0.05, {"reduction": "mean"}),
        ("distribution", 29, 0.02, {"reduction": "none"}),  # the complement's rows, of -scores
    ],
)
def test_targets_of_a_linear_classifier_in_chunks(form, k, tau, options: dict[str, Any]):
    n = 33
    features, weight = randn(4, 5).requires_grad_(), randn(n, 5, seed=1).requires_grad_()
    with torch.no_grad():
        features[2] *= 40  # far from flat
        weight[7] = weight[30]  # a tie
    label = torch.tensor([0, 20, 30, 7], device=DEVICE)
    target = {
        "smoothing": LabelMixture.smoothed(label, 0.1).scaled((label != 20).double()),
        "mixup": LabelMixture.mixed(label, label.flip(0), 0.7),
        "mixup and smoothing": LabelMixture.mixed(label, label.flip(0), torch.rand(4, device=DEVICE), 0.1),
    }.get(form, torch.where(torch.arange(n, device=DEVICE) % 4 == 0, 0.0, randn(4, n, seed=2).softmax(1)))
    numbers = torch.linspace(0, 2, n, device=DEVICE)
    options = {name: numbers if one is True else one for name, one in options.items()}
    found = linear_smooth_topk(features, weight, None, target, k=k, tau=tau, chunk=18, **options)
    exact = [t.detach().double().requires_grad_() for t in (features, weight)]
    q = target.dense(n, torch.float64) if isinstance(target, LabelMixture) else target.double()
    options = {name: one.double() if isinstance(one, torch.Tensor) else one for name, one in options.items()}
    options["weight"] = options.pop("class_weight", None)
    wanted = smooth_topk_hinge(exact[0] @ exact[1].T, q, k, tau=tau, impl="torch", **options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found.sum(), (features, weight)), torch.autograd.grad(wanted.sum(), exact)
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@runs_kernels
@pytest.mark.usefixtures("chunks_in_kernels")
def test_a_row_without_numbers_spoils_no_other():
    features, weight = randn(3, 5), randn(45, 5, seed=1)
    target = LabelMixture.smoothed(torch.tensor([0, 20, 44], device=DEVICE), 0.1)
    wanted = linear_smooth_topk(features, weight, None, target, k=3, chunk=20, reduction="none")
    features[1, 2] = torch.nan
    features.requires_grad_()
    value = linear_smooth_topk(features, weight, None, target, k=3, chunk=20, reduction="none")
    assert value[1].isnan()
    assert torch.equal(value[::2].detach(), wanted[::2])
    (gradient,) = torch.autograd.grad(value.sum(), features)
    assert gradient[1].isnan().all()
    assert gradient[::2].isfinite().all()


@pytest.mark.slow
@interprets
def test_under_the_interpreter():
    pass_under_the_interpreter(__file__)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("form", "k", "capability"), [("distribution", 5, 80), ("mixup", 10, 90)])
def test_compiles_for_gpus_and_stays_in_registers(form, k, capability, monkeypatch, tmp_path):
    launches = Launches(monkeypatch)
    label = torch.zeros(2, dtype=torch.long)
    kinds = {"smoothing": LabelMixture.smoothed(label, 0.1), "mixup": LabelMixture.mixed(label, label, 0.7)}
    launch_targets(torch.zeros(2, 65_536), kinds.get(form, torch.zeros(2, 65_536)), k)
    for kernel in launches.compiled(capability, tmp_path):
        assert kernel.stack == 0, kernel  # bytes a thread
