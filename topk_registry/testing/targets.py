"""Checks of targets: indices, distributions, and invalid targets."""

import itertools
from typing import Any

import torch
from torch import Tensor

from topk_registry.losses.base import ClassificationLoss
from topk_registry.losses.targets import LabelMixture
from topk_registry.testing.expect import CheckFailedError, NotApplicableError, check, expect, expect_close, of_rows
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient


@check
@of_rows
def one_hot_targets_equal_indices(subject: Subject) -> None:
    """Mixup and CutMix produce distributions. A one-hot distribution must give the same loss as its index."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    value, gradient = value_and_gradient(loss, logits, labels)
    dense_value, dense_gradient = value_and_gradient(loss, logits, subject.one_hot(labels))
    expect_close(dense_value, value, "loss of one-hot targets", floor=1.0)
    expect_close(dense_gradient, gradient, "gradient of one-hot targets")


@check
@of_rows
def dense_targets_count_in_full(subject: Subject) -> None:
    """A loss that uses only the arg max of a distribution ignores the mixed-in labels of mixup."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    one_hot = subject.one_hot(labels)
    pure, mixed = (evaluate(loss, logits, target) for target in (one_hot, 0.7 * one_hot + 0.3 * one_hot.roll(1, 0)))
    expect(
        not torch.isclose(pure, mixed, rtol=1e-4, atol=0),
        f"expected targets mixed 70:30 to change the loss, got {mixed.item():.6g} as without mixing",
    )


@check
@of_rows
def mixtures_equal_their_distributions(subject: Subject) -> None:
    """If a loss takes a LabelMixture, training passes mixed labels in this form instead of a distribution."""
    logits, labels, n = subject.logits(), subject.labels(), subject.num_classes
    other = torch.cat([labels[:1], labels[1:].roll(1, 0)])  # the first row is mixed with its own label
    common = [{}, {"weight": subject.class_weight()}] if subject.takes("weight") else [{}]
    for smoothing, options in itertools.product((0.0, 0.1), common):
        loss = subject.build(**options)
        mixture = LabelMixture.mixed(labels, other, 0.7, smoothing)
        if not isinstance(loss, ClassificationLoss):
            raise NotApplicableError("is not a ClassificationLoss, so it gets distributions")
        try:
            value, gradient = value_and_gradient(loss, logits, mixture)
        except Exception as error:  # training then passes distributions
            raise NotApplicableError(f"takes no LabelMixture ({type(error).__name__}: {error})") from error
        wanted, wanted_gradient = value_and_gradient(loss, logits, mixture.dense(n))
        expect_close(value, wanted, "loss of a LabelMixture", floor=1.0)
        expect_close(gradient, wanted_gradient, "gradient of a LabelMixture")


@check
def k_hot_targets_pull_up_their_labels(subject: Subject) -> None:
    """`--task multilabel` trains with a loss that declares ``takes_k_hot = True``. Rows have no, one or more labels."""
    if not subject.takes_k_hot:
        raise NotApplicableError("does not declare takes_k_hot = True")
    loss, logits, target = subject.build(), subject.logits(), subject.k_hot()
    value, gradient = value_and_gradient(loss, logits, target)
    expect(bool(value.isfinite().all() and gradient.isfinite().all()), f"expected finite numbers, got {value}")
    for row, labels in zip(gradient, target.bool(), strict=True):
        up, others = row[labels].mean(), row[~labels].mean()
        expect(
            bool(up < others),
            f"expected a step down the gradient to raise {int(labels.sum())} labels above the other classes, got mean "
            f"gradients of {up:.3g} at the labels and {others:.3g} at the others",
        )
    empty, gradient = value_and_gradient(loss, logits, torch.zeros_like(target))
    expect(
        bool(empty.isfinite().all() and gradient.isfinite().all()),
        f"expected finite numbers without labels, got {empty}",
    )
    _expect_error(loss, logits, torch.cat([target, target[:, :1]], dim=1), "a k-hot target with one class too many")


@check
def bad_targets_raise(subject: Subject) -> None:
    """A target of wrong shape, range or dtype must raise an error. Broadcasting it would train on noise."""
    loss, logits, n = subject.build(), subject.logits(), subject.num_classes
    labels, dense = subject.labels(), subject.distributions()
    bad = {
        "one label too many": torch.cat([labels, labels[:1]]),
        f"a label of {n} with {n} classes": labels.clone().fill_(n),
        "a label of -1": labels.clone().fill_(-1),
        "labels of shape [B, 1]": labels[:, None],
        "labels of float32": labels.float(),
        "a distribution over one class too many": torch.cat([dense, dense[:, :1]], dim=1),
    }
    for what, target in bad.items():
        _expect_error(loss, logits, target, what)


def _expect_error(loss: Loss, logits: Tensor, target: Tensor, what: str) -> None:
    try:
        value = evaluate(loss, logits, target)
    except Exception:  # any error will do, as long as it is one
        return
    raise CheckFailedError(f"expected an error for {what}, got the loss {value.detach()}")


@check
def hooks_agree(subject: Subject) -> None:
    """Labels, the table of all classes and a fused operator must give the same loss: mixup uses another hook."""
    loss: Any = subject.build(**({"reduction": "none"} if subject.takes("reduction") else {}))
    if not isinstance(loss, ClassificationLoss):
        raise NotApplicableError("is no ClassificationLoss")
    if subject.is_random:
        raise NotApplicableError("draws random numbers at each call")
    logits, labels = subject.logits(dtype=torch.float64), subject.labels()
    wanted = evaluate(loss, logits, labels)
    table = loss.per_class(logits)
    expect_close(table.gather(1, labels[:, None])[:, 0], wanted, "per_class at the labels", tolerance=1e-6)
    expect_close(loss.per_label(logits, labels), wanted, "per_label", tolerance=1e-6)


@check
def sample_weight_scales_rows(subject: Subject) -> None:
    """``sample_weight`` multiplies rows. ``mean`` divides by the sum of the weights of rows that are not ignored."""
    loss: Any = subject.build()
    if not isinstance(loss, ClassificationLoss) or subject.is_random:
        raise NotApplicableError("is not a ClassificationLoss, or draws random numbers")
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
