"""The conformance kit runs every check on the losses; what is particular to them is tested beside."""

import pytest
import torch

from gce_loss import GeneralisedCrossEntropy
from gce_loss.fused import FusedGeneralisedCrossEntropy
from gce_loss.kernel import KernelGeneralisedCrossEntropy
from topk_registry import create_loss, loss_info
from topk_registry.testing import parametrize_with_checks

FAST = [FusedGeneralisedCrossEntropy, KernelGeneralisedCrossEntropy]


@parametrize_with_checks([GeneralisedCrossEntropy, *FAST])
def test_conformance(check):
    check()


@pytest.mark.parametrize("name", ["gce", "gce_fused", "gce_kernel"])
def test_the_name_is_registered(name):
    assert loss_info(name).distribution == "gce-loss"
    assert isinstance(create_loss(name, q=0.5), GeneralisedCrossEntropy)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": [1.0, 0.0, 2.0]}])
def test_kernels_agree_with_the_table(fast, options):
    target = torch.tensor([0, 2, 1, -100, 2])
    losses_and_gradients = []
    for kind in (GeneralisedCrossEntropy, fast):
        logits = torch.linspace(-3, 3, 15, dtype=torch.float64).reshape(5, 3).roll(4).requires_grad_()
        value = kind(q=0.5, **options)(logits, target)
        value.sum().backward()
        losses_and_gradients.append((value.detach(), logits.grad))
    torch.testing.assert_close(losses_and_gradients[1], losses_and_gradients[0])


def test_small_q_is_cross_entropy():
    logits, target = torch.randn(8, 10, dtype=torch.float64), torch.arange(8)
    # (1 - p^q) / q = -log p - q (log p)^2 / 2 + ..., and -log p stays below 20 here
    torch.testing.assert_close(
        GeneralisedCrossEntropy(q=1e-6)(logits, target), torch.nn.CrossEntropyLoss()(logits, target), atol=2e-4, rtol=0
    )


def test_q_one_is_the_absolute_error():
    logits, target = torch.randn(8, 10, dtype=torch.float64), torch.arange(8)
    error = (logits.softmax(-1) - torch.nn.functional.one_hot(target, 10)).abs().sum(-1)
    torch.testing.assert_close(GeneralisedCrossEntropy(q=1.0)(logits, target), error.mean() / 2)


@pytest.mark.parametrize("q", [0.0, -1.0, 1.5])
def test_q_out_of_range(q):
    with pytest.raises(ValueError, match="q must be in"):
        GeneralisedCrossEntropy(q=q)
