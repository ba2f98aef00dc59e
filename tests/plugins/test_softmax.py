"""Losses of log p and log(1 - p) where a score of -inf rules classes out: as cross-entropy, down to the gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry import create_loss

N = 6
LOSSES = {
    "focal": {},
    "ldam": {"class_counts": [1, 4, 9, 16, 25, 36]},
    "encouraging": {},
    "cross-entropy by focal": {"gamma": 0.0},
    "cross-entropy by ldam": {"class_counts": [1] * N, "max_margin": 0.0, "scale": 1.0},
    "cross-entropy by encouraging": {"rho": 0.0},
}


def loss_and_gradient(loss, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    value = loss(logits, target)
    value.backward()
    return value.detach(), logits.grad


def scores(ruled_out: list[int]) -> Tensor:
    logits = torch.randn(1, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, ruled_out] = -torch.inf
    return logits


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("ruled_out", [[2], [0, 2], [0, 1, 3, 4, 5], [1, 2, 3, 4, 5]])
def test_classes_ruled_out(name, dense, ruled_out):
    logits, label = scores(ruled_out), torch.tensor([2])
    target = F.one_hot(label, N).double() if dense else label
    loss = create_loss(name.split(" by ")[-1], **LOSSES[name])
    value, gradient = loss_and_gradient(loss, logits, target)
    assert gradient.isfinite().all()
    assert (value == torch.inf) == (2 in ruled_out)
    if name.startswith("cross-entropy"):
        wanted, wanted_gradient = loss_and_gradient(torch.nn.CrossEntropyLoss(), logits, label)
        torch.testing.assert_close(value, wanted)
        torch.testing.assert_close(gradient, wanted_gradient)
