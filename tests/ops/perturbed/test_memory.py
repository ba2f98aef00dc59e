"""Peak memory beside the authors' own implementation (pytopk)."""

import pytest
import torch
from pytopk.noised_topk import NoisedTopK

from topk_registry import PerturbedTopK
from topk_studies.timing.memory import peak_bytes

K, DRAWS = 6, 5


@pytest.fixture
def scores():
    return torch.randn(256, 1000, generator=torch.Generator().manual_seed(0)).requires_grad_()


def forward_and_backward(module: torch.nn.Module, scores: torch.Tensor) -> None:
    torch.autograd.grad(module(scores).sum(), scores)


@pytest.mark.parametrize(("impl", "buffers"), [("torch", 2), ("numba", 1)])
def test_a_quarter_of_the_memory(scores, impl, buffers):
    modules = PerturbedTopK(K, epsilon=1.0, num_samples=DRAWS, impl=impl), NoisedTopK(K, epsilon=1.0, n_sample=DRAWS)
    ours, theirs = (peak_bytes(lambda module=module: forward_and_backward(module, scores)) for module in modules)
    assert theirs > 4 * ours, f"ours {ours / 2**20:.2f} MiB, theirs {theirs / 2**20:.2f} MiB"
    # the gradient, and on the torch path one buffer; not five of anything
    assert ours < (buffers + 0.5) * scores.numel() * 4
