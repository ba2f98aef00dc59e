"""Checks of numbers: the gradient is the derivative of the loss, also in half precision and for large logits."""

import torch
from torch import Tensor

from topk_registry.ops.masses import Target
from topk_registry.testing.expect import check, expect, expect_close, expect_finite, expect_same
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient

# A central difference has two errors: STEP^2 / 6 = 2e-11 times the third derivative of the loss, and a rounding error
# of eps * loss / STEP = 2e-11 * loss. In a loss as sharp as the softmax of 50 times the logits, third derivatives are
# 2500 times the gradient. So the relative error is about 4e-8, well below TOLERANCE.
STEP = 1e-5
TOLERANCE = 1e-6
DIRECTIONS = 8  # number of random directions; a wrong entry of the gradient changes the slope along each direction

# Largest allowed difference between half precision and float32 on the same logits, in units of eps of the dtype times
# the largest value. If the loss computes in float32 and rounds the result, the difference is below 1/2 of this unit.
HALF_ROUNDINGS = 4


@check
def gradient_equals_differences(subject: Subject) -> None:
    """Check that the gradient is close to central differences of the loss in float64, for every kind of target."""
    loss, logits = subject.build(), subject.logits(dtype=torch.float64)
    for kind, target in subject.targets(loss):
        value, gradient = value_and_gradient(loss, logits, target)
        expect(value.dtype == torch.float64, f"expected a float64 loss of float64 logits and {kind}, got {value.dtype}")
        expect_finite(value, f"float64 loss of {kind}")  # NaN would be equal to NaN below
        if not subject.estimates_gradient:
            _compare_with_differences(loss, logits, target, gradient, kind)


def _compare_with_differences(loss: Loss, logits: Tensor, target: Target, gradient: Tensor, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    directions = 2.0 * torch.randint(2, (DIRECTIONS, *logits.shape), generator=generator) - 1
    slopes = (gradient * directions).sum((1, 2))
    wanted = _slopes(loss, logits, target, directions.double())
    if not torch.allclose(slopes, wanted, rtol=0, atol=TOLERANCE * wanted.abs().max().item()):
        entries = torch.eye(logits.numel(), dtype=logits.dtype).view(-1, *logits.shape)
        entrywise = _slopes(loss, logits, target, entries).view_as(logits)
        expect_close(gradient, entrywise, f"gradient of {kind}", tolerance=TOLERANCE)
        expect_close(slopes, wanted, f"slope of {kind} along random directions", tolerance=TOLERANCE)


@torch.no_grad()
def _slopes(loss: Loss, logits: Tensor, target: Target, directions: Tensor) -> Tensor:
    steps = (STEP * direction for direction in directions)
    rises = [evaluate(loss, logits + h, target) - evaluate(loss, logits - h, target) for h in steps]
    return torch.stack(rises) / (2 * STEP)


@check
def gradient_descends(subject: Subject) -> None:
    """Check that a small step against the gradient lowers the loss. With a wrong sign, the step raises the loss."""
    loss, logits, labels = subject.example(torch.float64)
    value, gradient = value_and_gradient(loss, logits, labels)
    expect(gradient.abs().max() > 0, "expected a gradient at random logits, got zero everywhere: nothing is learned")
    rise = evaluate(loss, logits - 1e-4 * gradient / gradient.norm(), labels) - value
    expect(rise < 0, f"expected a step against the gradient to lower the loss, got {rise:+.3g} after {value:.6g}")


@check
def half_precision(subject: Subject) -> None:
    """Check that float16 and bfloat16 logits give nearly the loss and the gradient of the same logits in float32."""
    loss = subject.build()
    for dtype in (torch.float16, torch.bfloat16):
        for kind, target in subject.targets(loss):
            logits = subject.logits(dtype=dtype)
            got, wanted = (value_and_gradient(loss, scores, target) for scores in (logits, logits.float()))
            _expect_half_close(subject, got, wanted, dtype, kind)


@check
def large_logits(subject: Subject) -> None:
    """Check that loss and gradient are finite for logits of magnitude 60 to 10,000, as in a diverging model."""
    loss, labels = subject.build(), subject.labels()
    for dtype, scale in ((torch.float32, 60), (torch.float32, 1e4), (torch.float16, 300), (torch.bfloat16, 300)):
        logits, what = (scale * subject.logits()).to(dtype), f"of {dtype} logits around {scale:g}"
        value, gradient = value_and_gradient(loss, logits, labels)
        expect_finite(value, f"loss {what}")
        expect_finite(gradient, f"gradient {what}")
        if dtype == torch.float32 and not subject.is_random:
            wanted, _ = value_and_gradient(loss, logits.double(), labels)
            expect_close(value, wanted.float(), f"loss {what}", floor=scale)


@check
def cpu_autocast(subject: Subject) -> None:
    """Check that loss and gradient are the same under autocast. A loss with matrix products must disable autocast."""
    loss, logits, labels = subject.example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, half = (value_and_gradient(loss, scores, labels) for scores in (logits, logits.bfloat16()))
    expect_same(got, value_and_gradient(loss, logits, labels), "under autocast")
    wanted = value_and_gradient(loss, logits.bfloat16().float(), labels)
    _expect_half_close(subject, half, wanted, torch.bfloat16, "labels under autocast")


def _expect_half_close(
    subject: Subject, got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: torch.dtype, kind: str
) -> None:
    for part in got:
        expect_finite(part, f"loss and gradient of {dtype} logits and {kind}")
    if not subject.is_random:  # random numbers of two dtypes differ
        expect_same(got, wanted, f"of {dtype} logits and {kind}", HALF_ROUNDINGS * torch.finfo(dtype).eps)
