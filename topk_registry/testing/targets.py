"""Kinds of targets: indices, distributions, and what is neither."""

import torch
from torch import Tensor

from topk_registry.testing.expect import CheckFailedError, expect, expect_close
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient


def one_hot_targets_equal_indices(subject: Subject) -> None:
    """Mixup and cutmix turn indices into distributions; with nothing mixed in, nothing may change."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    value, gradient = value_and_gradient(loss, logits, labels)
    dense_value, dense_gradient = value_and_gradient(loss, logits, subject.one_hot(labels))
    expect_close(dense_value, value, "loss of one-hot targets", floor=1.0)
    expect_close(dense_gradient, gradient, "gradient of one-hot targets")


def dense_targets_count_in_full(subject: Subject) -> None:
    """A loss that takes the arg max of a distribution trains on mixed images as if they were not."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    one_hot = subject.one_hot(labels)
    pure, mixed = (evaluate(loss, logits, target) for target in (one_hot, 0.7 * one_hot + 0.3 * one_hot.roll(1, 0)))
    expect(
        not torch.isclose(pure, mixed, rtol=1e-4, atol=0),
        f"expected targets mixed 70:30 to change the loss, got {mixed.item():.6g} as for the larger part alone",
    )


def bad_targets_raise(subject: Subject) -> None:
    """A target of the wrong shape, range or dtype is a bug upstream; broadcasting it trains on noise for days."""
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


CHECKS = (one_hot_targets_equal_indices, dense_targets_count_in_full, bad_targets_raise)
