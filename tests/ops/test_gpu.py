"""On a GPU: both operators against double precision, CUDA graphs, and the conformance kit of every loss.

Run them with ``pytest -m gpu``.
"""

import pytest
import torch

from topk_registry import list_losses
from topk_registry.functional import perturbed_hinge, perturbed_topk, smooth_topk, topk_marginals
from topk_registry.ops.masses import LabelMixture, Masses
from topk_registry.testing import iter_checks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def targets(B: int, n: int) -> dict[str, Masses]:
    label = torch.arange(B) * 7 % n
    ignored = label.where(torch.arange(B) % 5 > 0, torch.tensor(-100))
    mixture = LabelMixture.mixed(label, label.flip(0), 0.7)
    table = torch.rand(B, n, generator=torch.Generator().manual_seed(0)).softmax(1)
    options = {"labels": (ignored, 0.0), "smoothed": (ignored, 0.1), "mixture": (mixture, 0.0), "dense": (table, 0.0)}

    def on_gpu(target: torch.Tensor | LabelMixture) -> torch.Tensor | LabelMixture:
        if isinstance(target, torch.Tensor):
            return target.cuda()
        return LabelMixture(*(part if part is None else part.cuda() for part in target))

    scores = torch.zeros(B, n, device="cuda")
    return {
        kind: Masses.of(scores, on_gpu(target), label_smoothing=smoothing, reduction="sum")
        for kind, (target, smoothing) in options.items()
    }


def logits(B: int, n: int, seed: int = 0) -> torch.Tensor:
    """Rows that are flat, rows with leaders, and rows with ties."""
    s = torch.randn(B, n, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.1, 8, B)[:, None]
    s[::3] = s[::3].round()
    return s.cuda()


@pytest.mark.parametrize("target", ["labels", "smoothed", "mixture", "dense"])
@pytest.mark.parametrize(("n", "k", "tau"), [(11, 3, 1.0), (1000, 5, 0.1), (1000, 10, 1.0), (21_841, 5, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smooth_topk_against_double_precision(n, k, tau, target, dtype):
    masses = targets(24, n)[target]
    s = logits(24, n).to(dtype).requires_grad_()
    losses = smooth_topk(s, masses, k=k, tau=tau)
    (gradient,) = torch.autograd.grad(losses.sum(), s)
    wide = s.detach().double().requires_grad_()
    expected = smooth_topk(wide, masses, k=k, tau=tau)
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), slope, rtol=0, atol=2e-6 if dtype == torch.float32 else 4e-3)


def test_rows_without_mass_and_nan_rows():
    s, label = logits(4, 50), torch.tensor([3, -100, 2, 1]).cuda()
    s[1], s[3, 7] = torch.nan, torch.nan
    s.requires_grad_()
    masses = Masses.of(s, label)
    for losses in (smooth_topk(s, masses, k=5), perturbed_hinge(s, masses, k=5, alpha=50.0)):
        (gradient,) = torch.autograd.grad(losses.sum(), s)
        assert losses.isnan().tolist() == [False, False, False, True]
        assert gradient.isnan().any(1).tolist() == [False, False, False, True]
        assert gradient[1].count_nonzero() == 0


@pytest.mark.parametrize(("n", "k"), [(30, 3), (1000, 6), (1000, 997)])
def test_perturbed_topk_without_much_noise_and_unbiased(n, k):
    s = torch.randn(64, n, device="cuda").requires_grad_()
    value = perturbed_topk(s, k, epsilon=1e-6, num_samples=3)
    (gradient,) = torch.autograd.grad(value.sum(), s)
    torch.testing.assert_close(value, s.sort(1, descending=True).values[:, k - 1], rtol=0, atol=1e-4)
    torch.testing.assert_close(gradient.sum(1), torch.ones(64, device="cuda"))
    kernel = perturbed_topk(s.detach()[:1].expand(4000, n), k, num_samples=1)
    plain = perturbed_topk(s.detach()[:1].double().expand(4000, n), k, num_samples=1)
    error = (kernel.double().var() / 4000 + plain.var() / 4000).sqrt()
    assert (kernel.double().mean() - plain.mean()).abs() < 5 * error


def test_marginals_in_single_precision():
    s = logits(8, 1000)
    for k in (1, 5, 50):
        torch.testing.assert_close(topk_marginals(s, k).double(), topk_marginals(s.double(), k), rtol=0, atol=1e-5)


@pytest.mark.parametrize("target", ["labels", "smoothed"])
def test_a_cuda_graph_replays(target):
    masses, s = targets(64, 1000)[target], logits(64, 1000).requires_grad_()
    fresh = logits(64, 1000, seed=1)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        losses = smooth_topk(s, masses, k=5, tau=0.1, alpha=1.0)
        return losses, torch.autograd.grad(losses.sum(), s)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        s.copy_(fresh)
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", list_losses(exclude=["ce", "bce", "asl", "poly", "jsd", "twoway", "zlpr", "db"]))
def test_the_kit_on_cuda(loss):
    (check,) = [check for check in iter_checks(loss) if check.name == "runs_on_cuda"]
    check()
