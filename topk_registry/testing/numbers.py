"""Checks of numbers: the gradient is the derivative of the loss, also with half precision and large scores."""

import torch
from torch import Tensor

from topk_registry.losses.targets import Target
from topk_registry.testing.expect import check, expect, expect_close, expect_finite, expect_same
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient

# Central differences err by step^2/6 times the third derivative, which is 2e-11 of it, and by rounding, eps * loss /
# step = 2e-11 * loss. A loss as sharp as softmax of 50 s has third derivatives 2500 times its gradient: 4e-8 of the
# largest.
STEP = 1e-5
TOLERANCE = 1e-6
DIRECTIONS = 8  # a wrong entry changes all projections; only then is every entry compared

# Compared with float32 on the same scores, the error may be that of cross-entropy with intermediate results in half
# precision: a few eps of the largest value. A loss that computes in float32 is within half an eps.
HALF_ROUNDINGS = 4


@check
def gradient_equals_differences(subject: Subject) -> None:
    """A hand-written backward pass must match the forward pass, for every kind of target. The check needs a loss that
    computes in float64."""
    loss, logits = subject.build(), subject.logits(dtype=torch.float64)
    for kind, target in subject.targets(loss):
        value, gradient = value_and_gradient(loss, logits, target)
        expect(value.dtype == torch.float64, f"expected a float64 loss of float64 logits and {kind}, got {value.dtype}")
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
    """A small step against the gradient must lower the loss. With a wrong sign, the loss increases."""
    loss, logits, labels = subject.build(), subject.logits(dtype=torch.float64), subject.labels()
    value, gradient = value_and_gradient(loss, logits, labels)
    expect(gradient.abs().max() > 0, "expected a gradient at random scores, got zero everywhere: nothing is learned")
    rise = evaluate(loss, logits - 1e-4 * gradient / gradient.norm(), labels) - value
    expect(rise < 0, f"expected a step against the gradient to lower the loss, got {rise:+.3g} after {value:.6g}")


@check
def half_precision(subject: Subject) -> None:
    """float16 overflows at 65504 and bfloat16 has three digits, so a loss has to compute in float32 inside. With mixup,
    scores are in half precision and distributions in float32."""
    loss = subject.build()
    for dtype in (torch.float16, torch.bfloat16):
        for kind, target in subject.targets(loss):
            logits = subject.logits(dtype=dtype)
            got, wanted = (value_and_gradient(loss, scores, target) for scores in (logits, logits.float()))
            _expect_half_close(subject, got, wanted, dtype, kind)


@check
def large_logits(subject: Subject) -> None:
    """Diverging or confident networks have scores of 60 or 1e4. Without a shift by the maximum, exp overflows."""
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
    """Under autocast, scores are bfloat16 and matrix products use bfloat16, unless the loss disables autocast."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
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
