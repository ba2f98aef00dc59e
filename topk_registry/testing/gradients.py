"""Checks of the gradient: it is the derivative of the value, and a step along it lowers the loss."""

import torch
from torch import Tensor

from topk_registry.testing.expect import check, expect, expect_close, of_exact_gradients, of_rows
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient

# Central differences err by step^2/6 times the third derivative, which is 2e-11 of it, and by rounding, eps * loss /
# step = 2e-11 * loss. A loss as sharp as softmax of 50 s has third derivatives 2500 times its gradient: 4e-8 of the
# largest.
STEP = 1e-5
TOLERANCE = 1e-6
DIRECTIONS = 8  # a wrong entry changes all of them; only then is every entry compared


@check
@of_exact_gradients
def gradient_equals_differences(subject: Subject) -> None:
    """A hand-written backward pass must match the forward pass. The check needs a loss that computes in float64."""
    _compare_with_differences(subject.build(), subject.logits(dtype=torch.float64), subject.labels())


@check
@of_rows
def dense_gradient_equals_differences(subject: Subject) -> None:
    """Dense targets often use different code than indices, with a separate backward pass."""
    target = subject.distributions(dtype=torch.float64)
    _compare_with_differences(subject.build(), subject.logits(dtype=torch.float64), target)


def _compare_with_differences(loss: Loss, logits: Tensor, target: Tensor) -> None:
    value, gradient = value_and_gradient(loss, logits, target)
    expect(value.dtype == torch.float64, f"expected a float64 loss of float64 logits, got {value.dtype}")
    generator = torch.Generator().manual_seed(0)
    directions = 2.0 * torch.randint(2, (DIRECTIONS, *logits.shape), generator=generator) - 1
    slopes = (gradient * directions).sum((1, 2))
    wanted = _slopes(loss, logits, target, directions.double())
    if not torch.allclose(slopes, wanted, rtol=0, atol=TOLERANCE * wanted.abs().max().item()):
        entries = torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape)
        entrywise = _slopes(loss, logits, target, entries).view_as(logits)
        expect_close(gradient, entrywise, "gradient", tolerance=TOLERANCE)
        expect_close(slopes, wanted, "slope along random directions", tolerance=TOLERANCE)


@torch.no_grad()
def _slopes(loss: Loss, logits: Tensor, target: Tensor, directions: Tensor) -> Tensor:
    steps = (STEP * direction for direction in directions)
    rises = [evaluate(loss, logits + h, target) - evaluate(loss, logits - h, target) for h in steps]
    return torch.stack(rises) / (2 * STEP)


@check
def gradient_descends(subject: Subject) -> None:
    """A small step against the gradient must lower the loss. With a wrong sign, the loss increases."""
    loss, logits, labels = subject.build(), subject.logits(dtype=torch.float64), subject.labels()
    value, gradient = value_and_gradient(loss, logits, labels)
    expect(gradient.abs().max() > 0, "expected a gradient at random scores, got zero everywhere: nothing is learned")
    after = evaluate(loss, logits - 1e-4 * gradient / gradient.norm(), labels)
    expect(
        after < value,
        f"expected a step against the gradient to lower the loss, got {after - value:+.3g} after {value:.6g}",
    )
