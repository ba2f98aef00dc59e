"""Checks with half precision, large scores and autocast, which occur in mixed-precision training."""

import torch
from torch import Tensor

from topk_registry.testing.expect import check, expect_close, expect_finite, of_rows
from topk_registry.testing.subject import Loss, Subject, value_and_gradient

# Compared with float32 on the same scores, the error may be that of cross-entropy with intermediate results in half
# precision: a few eps of the largest value. A loss that computes in float32 is within half an eps.
HALF_ROUNDINGS = 4


@check
def half_precision(subject: Subject) -> None:
    """float16 overflows at 65504 and bfloat16 has three digits, so a loss has to compute in float32 inside."""
    loss, labels = subject.build(), subject.labels()
    for dtype in (torch.float16, torch.bfloat16):
        for scale in (1.0, 300.0):  # at 1e4, the sum over classes and rows exceeds 65504
            logits = (scale * subject.logits()).to(dtype)
            value, gradient = value_and_gradient(loss, logits, labels)
            expect_finite(value, f"loss of {dtype} logits around {scale:g}")
            expect_finite(gradient, f"gradient of {dtype} logits around {scale:g}")
            if scale == 1.0 and not subject.is_random:  # random numbers of two dtypes differ
                _expect_half_close((value, gradient), value_and_gradient(loss, logits.float(), labels), dtype)


def _expect_half_close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    tolerance = HALF_ROUNDINGS * torch.finfo(dtype).eps
    expect_close(got[0], wanted[0], f"loss of {dtype} logits", tolerance=tolerance, floor=1.0)
    expect_close(got[1], wanted[1], f"gradient of {dtype} logits", tolerance=tolerance)


@check
def large_logits(subject: Subject) -> None:
    """Diverging or confident networks have scores of 60 or 1e4. Without a shift by the maximum, exp overflows."""
    loss = subject.build()
    for scale in (60.0, 1e4):
        logits, labels = scale * subject.logits(), subject.labels()
        value, gradient = value_and_gradient(loss, logits, labels)
        expect_finite(value, f"loss of logits around {scale:g}")
        expect_finite(gradient, f"gradient of logits around {scale:g}")
        if not subject.is_random:
            wanted, _ = value_and_gradient(loss, logits.double(), labels)
            expect_close(value, wanted.float(), f"loss of logits around {scale:g}", floor=scale)


@check
def cpu_autocast(subject: Subject) -> None:
    """Under autocast, scores are bfloat16 and matrix products use bfloat16, unless the loss disables autocast."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = value_and_gradient(loss, logits, labels)
        half = value_and_gradient(loss, logits.bfloat16(), labels)
    value, gradient = value_and_gradient(loss, logits, labels)
    expect_close(got[0], value, "loss under autocast", floor=1.0)
    expect_close(got[1], gradient, "gradient under autocast")
    if not subject.is_random:
        _expect_half_close(half, value_and_gradient(loss, logits.bfloat16().float(), labels), torch.bfloat16)


@check
@of_rows
def half_precision_with_dense_targets(subject: Subject) -> None:
    """With mixup and autocast, scores are in half precision and distributions in float32."""
    loss: Loss = subject.build()
    for dtype in (torch.float16, torch.bfloat16):
        logits, target = subject.logits(dtype=dtype), subject.distributions()
        got = value_and_gradient(loss, logits, target)
        expect_finite(got[1], f"gradient of {dtype} logits and dense targets")
        if not subject.is_random:
            _expect_half_close(got, value_and_gradient(loss, logits.float(), target), dtype)
