"""The hooks of a :class:`ClassificationLoss` agree with each other and with the call."""

from typing import Any

import torch
from torch import Tensor

from topk_registry.losses.base import ClassificationLoss
from topk_registry.testing.expect import NotApplicableError, expect_close
from topk_registry.testing.subject import Subject, evaluate

TOLERANCE = 1e-6  # of a loss in double precision: an option that is left out changes more


def hooks_agree(subject: Subject) -> None:
    """Labels, the table of all classes and a fused operator are one loss; mixup and smoothing use another hook."""
    loss: Any = subject.build(**({"reduction": "none"} if subject.takes("reduction") else {}))
    if not isinstance(loss, ClassificationLoss):
        raise NotApplicableError("is no ClassificationLoss")
    if subject.is_random:
        raise NotApplicableError("draws random numbers at each call")
    logits, labels = subject.logits(dtype=torch.float64), subject.labels()
    wanted = evaluate(loss, logits, labels)
    table = loss.per_class(logits)
    expect_close(table.gather(1, labels[:, None])[:, 0], wanted, "per_class at the labels", tolerance=TOLERANCE)
    expect_close(loss.per_label(logits, labels), wanted, "per_label", tolerance=TOLERANCE)


def sample_weight_scales_rows(subject: Subject) -> None:
    """``sample_weight`` multiplies rows; ``mean`` divides by the sum of the weights of the rows that count."""
    loss: Any = subject.build()
    if not isinstance(loss, ClassificationLoss) or subject.is_random:
        raise NotApplicableError("is no ClassificationLoss, or draws random numbers")
    subject.require("reduction", "ignore_index")
    logits, labels = subject.logits(dtype=torch.float64), subject.labels()
    labels[2] = -100
    weight = logits[:, 0].abs() + 0.5
    rows = evaluate(subject.build(reduction="none"), logits, labels)
    got: dict[str, Tensor] = {}
    for name in ("none", "sum", "mean"):
        built: Any = subject.build(reduction=name)
        got[name] = built(logits, labels, sample_weight=weight)
    expect_close(got["none"], rows * weight, "loss of weighted rows", floor=1.0)
    expect_close(got["sum"], (rows * weight).sum(), "sum of weighted rows", floor=1.0)
    counted = weight.sum() - weight[2]
    expect_close(got["mean"], (rows * weight).sum() / counted, "mean of weighted rows", floor=1.0)


CHECKS = (hooks_agree, sample_weight_scales_rows)
