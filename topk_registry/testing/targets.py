"""Checks of targets: class indices, distributions, and invalid targets."""

from typing import Any

import torch
from torch import Tensor

from topk_registry.losses.base import ClassificationLoss
from topk_registry.ops.masses import LabelMixture
from topk_registry.registry.signatures import unbound
from topk_registry.testing.expect import NotApplicableError, check, expect, expect_close, expect_finite, expect_same
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient


@check
def takes_distributions(subject: Subject) -> None:
    """Check that a one-hot target gives the loss of the class index, and that mixing two labels changes the loss."""
    subject.needs_rows()
    loss, logits, labels = subject.example()
    one_hot = subject.one_hot(labels)
    pure = value_and_gradient(loss, logits, labels)
    expect_same(value_and_gradient(loss, logits, one_hot), pure, "of one-hot targets")
    mixed = evaluate(loss, logits, 0.7 * one_hot + 0.3 * one_hot.roll(1, 0))
    expect(
        not torch.isclose(pure[0], mixed, rtol=1e-4, atol=0),
        f"expected targets mixed 70:30 to change the loss, got {mixed.item():.6g} as without mixing",
    )
    for options in [{}, {"weight": subject.class_weight()}] if subject.takes("weight") else [{}]:
        loss = subject.build(**options)
        for kind, target in subject.targets(loss):
            if isinstance(target, LabelMixture):  # with mixup, the trainer passes this type if the loss accepts it
                wanted = value_and_gradient(loss, logits, target.dense(subject.num_classes))
                expect_same(value_and_gradient(loss, logits, target), wanted, f"of {kind}")


@check
def k_hot_targets_pull_up_their_labels(subject: Subject) -> None:
    """If ``loss.takes_k_hot`` is True, check that a gradient step with a k-hot target raises all labels' logits."""
    if getattr(unbound(subject.factory), "takes_k_hot", False) is not True:
        raise NotApplicableError("does not declare takes_k_hot = True")
    loss = subject.build()
    logits = subject.logits()
    n = subject.num_classes
    # row 0 has one label, row 1 has two labels, and so on
    target = (logits.argsort(1).argsort(1) <= torch.arange(len(logits))[:, None] % (n - 1)).float()
    for k_hot in (target, torch.zeros_like(target)):
        value, gradient = value_and_gradient(loss, logits, k_hot)
        expect_finite(value, f"loss of {int(k_hot.sum())} labels")
        expect_finite(gradient, f"gradient of {int(k_hot.sum())} labels")
    _, gradient = value_and_gradient(loss, logits, target)
    for row, labels in zip(gradient, target.bool(), strict=True):
        up, others = row[labels].mean(), row[~labels].mean()
        expect(
            up < others,
            f"expected a step down the gradient to raise {int(labels.sum())} labels above the other classes, got mean "
            f"gradients of {up:.3g} at the labels and {others:.3g} at the others",
        )
    _expect_error(loss, logits, torch.cat([target, target[:, :1]], dim=1), "a k-hot target with one class too many")


@check
def bad_targets_raise(subject: Subject) -> None:
    """Check that a target with a wrong shape, range or dtype raises an error instead of giving a wrong loss."""
    loss = subject.build()
    logits = subject.logits()
    n = subject.num_classes
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
    except Exception:
        return
    expect(False, f"expected an error for {what}, got the loss {value.detach()}")


@check
def hooks_agree(subject: Subject) -> None:
    """Check that ``per_class`` and ``per_label`` of a ClassificationLoss give the same losses as a call of the loss."""
    loss: Any = subject.build(**({"reduction": "none"} if subject.takes("reduction") else {}))
    if not isinstance(loss, ClassificationLoss) or subject.is_random:
        raise NotApplicableError("is not a ClassificationLoss, or draws random numbers")
    logits, labels = subject.logits(dtype=torch.float64), subject.labels()
    wanted = evaluate(loss, logits, labels)
    table = loss.per_class(logits)
    expect_close(table.gather(1, labels[:, None])[:, 0], wanted, "per_class at the labels", tolerance=1e-6)
    expect_close(loss.per_label(logits, labels), wanted, "per_label", tolerance=1e-6)
