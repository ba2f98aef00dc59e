"""Checks of a batch: the loss of one row does not depend on the other rows."""

import torch
from torch import Tensor

from topk_registry.losses.targets import Target
from topk_registry.testing.expect import check, expect, expect_close, expect_finite, of_rows
from topk_registry.testing.subject import BATCH, Loss, Subject, evaluate, value_and_gradient

BROKEN = 1  # the row with NaN


@check
@of_rows
def row_order_is_irrelevant(subject: Subject) -> None:
    """A permutation of the batch must not change the loss, and must permute the gradient."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    order = torch.tensor([2, 0, 3, 1])
    subject.expect_same_value(
        lambda: loss(logits, labels), lambda: loss(logits[order], labels[order]), "loss of the shuffled batch"
    )
    if not subject.is_random:
        _, gradient = value_and_gradient(loss, logits, labels)
        _, shuffled = value_and_gradient(loss, logits[order], labels[order])
        expect_close(shuffled, gradient[order], "gradient of the shuffled batch")


@check
@of_rows
def rows_are_independent(subject: Subject) -> None:
    """If the loss of a row depends on other rows, it changes with the batch size and the number of GPUs."""
    loss, labels = subject.build(), subject.labels()
    before, after = subject.logits(), subject.logits()
    after[0] = after[0].flip(0) + 1
    _, gradient = value_and_gradient(loss, before, labels)
    _, changed = value_and_gradient(loss, after, labels)
    expect_close(changed[1:], gradient[1:], "gradient of rows 1 to 3 after row 0 changed")


@check
@of_rows
def nan_stays_in_its_row(subject: Subject) -> None:
    """NaN in one sample must give NaN in the loss of this sample, for every kind of target, and in no other loss."""
    logits, labels = subject.logits(), subject.labels()
    places = {
        "a whole row of NaN": torch.arange(subject.num_classes),
        "NaN at the label": labels[BROKEN],
        "NaN at the largest of the other logits": logits[BROKEN].index_fill(0, labels[BROKEN], -torch.inf).argmax(),
        "NaN at the smallest of the other logits": logits[BROKEN].index_fill(0, labels[BROKEN], torch.inf).argmin(),
    }
    loss = subject.build()
    for kind, target in subject.targets(loss):
        _, wanted = value_and_gradient(loss, logits, target)
        for where, classes in places.items():
            _expect_nan(loss, logits, target, classes, wanted, f"{where} and {kind}")
    if subject.takes("label_smoothing"):
        smoothed = subject.build(label_smoothing=0.1)
        _, wanted = value_and_gradient(smoothed, logits, labels)
        for where, classes in places.items():
            _expect_nan(smoothed, logits, labels, classes, wanted, f"{where} and smoothed labels")
    if subject.takes("reduction"):
        broken = logits.index_fill(0, torch.tensor(BROKEN), torch.nan)
        rows = evaluate(subject.build(reduction="none"), broken, labels)
        expect(bool(rows[BROKEN].isnan()), f"expected a NaN loss of a whole row of NaN, got {rows[BROKEN]:.6g}")
        expect_finite(_others(rows), "loss of the other rows of a batch with NaN")


def _others(rows: Tensor) -> Tensor:
    return torch.cat((rows[:BROKEN], rows[BROKEN + 1 :]))


def _expect_nan(loss: Loss, logits: Tensor, target: Target, classes: Tensor, wanted: Tensor, what: str) -> None:
    broken = logits.clone()
    broken[BROKEN, classes] = torch.nan
    value, gradient = value_and_gradient(loss, broken, target)
    expect(bool(value.isnan()), f"expected a NaN loss for {what}, got {value.item():.6g}")
    expect_close(_others(gradient), _others(wanted), f"gradient of the other rows with {what}")
    own = gradient[BROKEN]
    expect(bool(own.isnan().any()), f"expected NaN in the gradient of the row with {what}, got {own}")


@check
@of_rows
def batch_of_one(subject: Subject) -> None:
    """The last batch of an epoch may have one sample. Squeezed shapes and batch statistics fail on it."""
    loss, logits, labels = subject.build(), subject.logits()[:1], subject.labels()[:1]
    copies, copied = logits.repeat(BATCH, 1), labels.repeat(BATCH)
    value, gradient = value_and_gradient(loss, logits, labels)
    expect(value.ndim == 0, f"expected a 0-dim loss of one row, got shape {list(value.shape)}")
    expect_finite(gradient, "gradient of one row")
    # a loss may average or sum its rows; for copies of one row, both results are known
    rows = BATCH if evaluate(loss, copies, copied).abs() > 2 * value.abs() else 1
    subject.expect_same_value(
        lambda: loss(logits, labels) * rows, lambda: loss(copies, copied), f"loss of {BATCH} copies of a row"
    )


@check
@of_rows
def empty_batch(subject: Subject) -> None:
    """A shard or a filter may leave no rows. As in cross-entropy, sum gives 0, none gives [0], and mean gives NaN."""
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
