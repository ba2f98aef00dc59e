"""Epsilon-softmax: ties, masked classes, and its limits."""

import math

import pytest
import torch
from torch.nn import functional as F

from topk_registry import create_loss

B, N = 40, 9


def test_tied_labels_are_outside():
    """A network that starts with all scores alike must learn."""
    leaf = torch.zeros(1, 6, requires_grad=True)
    create_loss("epsilon_softmax", k=2, beta=0.0, alpha=1.0)(leaf, torch.tensor([0])).backward()
    torch.testing.assert_close(leaf.grad[0], torch.full((6,), 1 / 6) - F.one_hot(torch.tensor(0), 6))


def test_without_cross_entropy_a_masked_class_with_mass_costs_the_absolute_error():
    s = torch.tensor([[1.0, 0.0, -math.inf]], dtype=torch.float64)
    p, q = s.softmax(-1), torch.tensor([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3], dtype=torch.float64)
    found = create_loss("epsilon_softmax", alpha=0.0, label_smoothing=0.1)(s, torch.tensor([0]))
    torch.testing.assert_close(found, (q * 2 * (1 - p)).sum(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("m", [0.0, 1e300, 1.7e308])
def test_the_least_and_the_largest_m(m, k):
    """The loss at m = 0 is cross-entropy, also where a class is masked; a large m does not overflow."""
    s = torch.tensor([[1.0, -math.inf, 0.5, 2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    loss = create_loss("epsilon_softmax", k=k, m=m, alpha=1.0, beta=0.0)
    soft = torch.tensor([[0.25, 0.0, 0.25, 0.25, 0.25]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(loss(s, torch.tensor([4])), s)
    assert gradient.isfinite().all()
    if m == 0.0:
        (gradient,) = torch.autograd.grad(loss(s, soft), s)
        wanted = torch.autograd.grad(-(soft * s.log_softmax(-1).nan_to_num(neginf=0.0)).sum(), s)[0]
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    else:
        outside = math.log(m) + math.log(k)
        torch.testing.assert_close(
            loss(s, torch.tensor([4])).detach(), outside - s.detach().log_softmax(-1)[0, 4], rtol=1e-12, atol=0
        )
