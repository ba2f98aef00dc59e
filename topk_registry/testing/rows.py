"""The batch: rows are samples, and one sample's loss is its own affair."""

import torch

from topk_registry.testing.expect import expect, expect_close, expect_finite
from topk_registry.testing.subject import BATCH, Subject, evaluate, value_and_gradient


def row_order_is_irrelevant(subject: Subject) -> None:
    """Shuffling a batch may not change its loss, and shuffles the gradient along."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    order = torch.tensor([2, 0, 3, 1])
    subject.expect_same_value(
        lambda: loss(logits, labels), lambda: loss(logits[order], labels[order]), "loss of the shuffled batch"
    )
    if not subject.is_random:
        _, gradient = value_and_gradient(loss, logits, labels)
        _, shuffled = value_and_gradient(loss, logits[order], labels[order])
        expect_close(shuffled, gradient[order], "gradient of the shuffled batch")


def rows_are_independent(subject: Subject) -> None:
    """A loss that looks across the batch changes with the batch size and with the number of GPUs."""
    loss, labels = subject.build(), subject.labels()
    before, after = subject.logits(), subject.logits()
    after[0] = after[0].flip(0) + 1
    _, gradient = value_and_gradient(loss, before, labels)
    _, changed = value_and_gradient(loss, after, labels)
    expect_close(changed[1:], gradient[1:], "gradient of rows 1 to 3 after row 0 changed")


def nan_stays_in_its_row(subject: Subject) -> None:
    """One broken sample should show as NaN in its own loss, neither hidden nor spread over the batch."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    _, wanted = value_and_gradient(loss, logits, labels)
    logits[1] = torch.nan
    value, gradient = value_and_gradient(loss, logits, labels)
    others = torch.tensor([0, 2, 3])
    expect(bool(value.isnan()), f"expected NaN logits to give a NaN loss, got {value.item():.6g}")
    expect_close(gradient[others], wanted[others], "gradient of the rows beside a NaN row")
    if subject.takes("reduction"):
        rows = evaluate(subject.build(reduction="none"), logits, labels)
        expect_finite(rows[others], "loss of the rows beside a NaN row")


def batch_of_one(subject: Subject) -> None:
    """The last batch of an epoch can hold one sample; squeezed shapes and batch statistics break there."""
    loss, logits, labels = subject.build(), subject.logits()[:1], subject.labels()[:1]
    copies, copied = logits.repeat(BATCH, 1), labels.repeat(BATCH)
    value, gradient = value_and_gradient(loss, logits, labels)
    expect(value.ndim == 0, f"expected a 0-dim loss of one row, got shape {list(value.shape)}")
    expect_finite(gradient, "gradient of one row")
    # a loss may average or add up its rows; of copies of a row either is known
    rows = BATCH if evaluate(loss, copies, copied).abs() > 2 * value.abs() else 1
    subject.expect_same_value(
        lambda: loss(logits, labels) * rows, lambda: loss(copies, copied), f"loss of {BATCH} copies of a row"
    )


def empty_batch(subject: Subject) -> None:
    """A shard or a filter can leave no rows: sum gives 0, none gives [0], mean gives NaN, as in cross-entropy."""
    logits, labels = subject.logits()[:0], subject.labels()[:0]
    if not subject.takes("reduction"):
        value_and_gradient(subject.build(), logits, labels)
        return
    wanted = {"none": torch.zeros(0), "sum": torch.tensor(0.0), "mean": torch.tensor(torch.nan)}
    for reduction, expected in wanted.items():
        value, gradient = value_and_gradient(subject.build(reduction=reduction), logits, labels)
        expect_close(value, expected, f"loss of an empty batch, reduction {reduction!r},")
        expect(
            gradient.shape == logits.shape, f"expected a gradient of shape {list(logits.shape)}, got {gradient.shape}"
        )


CHECKS = (row_order_is_irrelevant, rows_are_independent, nan_stays_in_its_row, batch_of_one, empty_batch)
