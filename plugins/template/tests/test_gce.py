"""The conformance kit runs every check on the loss; what is particular to it is tested beside."""

import pytest
import torch

from gce_loss import GeneralisedCrossEntropy
from topk_registry import create_loss, loss_info
from topk_registry.testing import parametrize_with_checks


@parametrize_with_checks([GeneralisedCrossEntropy])
def test_conformance(check):
    check()


def test_the_name_is_registered():
    assert loss_info("gce").distribution == "gce-loss"
    assert isinstance(create_loss("gce", q=0.5), GeneralisedCrossEntropy)


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
