"""Tests of the loss: the conformance kit of topk_registry, values of the paper's formula, and creation by name."""

import pytest
import torch

import topk_registry
from gce_loss import GeneralisedCrossEntropy
from topk_registry.testing import parametrize_with_checks


@parametrize_with_checks([GeneralisedCrossEntropy])
def test_conformance(check):
    check()


@pytest.mark.parametrize("q", [0.1, 0.7, 1.0])
def test_the_formula(q):
    logits, target = torch.randn(5, 7, dtype=torch.float64), torch.arange(5)
    p = logits.softmax(1)[torch.arange(5), target]
    torch.testing.assert_close(GeneralisedCrossEntropy(q=q)(logits, target), ((1 - p**q) / q).mean())


def test_it_is_found_by_its_name():
    assert isinstance(topk_registry.create_loss("gce", q=0.5), GeneralisedCrossEntropy)
