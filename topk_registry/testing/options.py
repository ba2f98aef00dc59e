"""Checks of options: options of ``torch.nn.CrossEntropyLoss`` have the same meaning here."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from topk_registry.losses.base import ClassificationLoss
from topk_registry.registry.options import parameters, tuning_grid
from topk_registry.registry.ranges import Interval, option_ranges
from topk_registry.testing.expect import CheckFailedError, NotApplicableError, check, expect, expect_close
from topk_registry.testing.subject import EPOCHS, Loss, Subject, evaluate, value_and_gradient


@check
def reduction_is_consistent(subject: Subject) -> None:
    """``none`` returns one loss per row, ``sum`` the sum, and ``mean`` the mean. Any other value is an error."""
    subject.require("reduction")
    logits, labels = subject.logits(), subject.labels()
    plain = {"weight": None} if subject.takes("weight") else {}
    rows, total, mean = (evaluate(subject.build(reduction=r, **plain), logits, labels) for r in ("none", "sum", "mean"))
    for reduction, value, shape in (("none", rows, list(labels.shape)), ("sum", total, []), ("mean", mean, [])):
        expect(
            list(value.shape) == shape,
            f"reduction={reduction!r} must give a loss of shape {shape}, got {list(value.shape)}",
        )
    expect_close(total, rows.sum(), "loss of reduction 'sum'", floor=1.0)
    expect_close(mean, rows.mean(), "loss of reduction 'mean'", floor=1.0)
    try:
        evaluate(subject.build(reduction="average"), logits, labels)
    except ValueError:
        return
    raise CheckFailedError("expected a ValueError for reduction='average', got a loss")


@check
def weight_scales_rows(subject: Subject) -> None:
    """``weight`` multiplies a row by the factor of its label. ``mean`` divides by the sum of these factors."""
    subject.require("weight", "reduction")
    logits, labels, weight = subject.logits(), subject.labels(), subject.class_weight()
    hard = {"label_smoothing": 0.0} if subject.takes("label_smoothing") else {}
    plain = evaluate(subject.build(weight=None, reduction="none", **hard), logits, labels)
    rows, mean = (evaluate(subject.build(weight=weight, reduction=r, **hard), logits, labels) for r in ("none", "mean"))
    wanted = plain * weight[labels]
    expect_close(rows, wanted, "loss of weighted rows", floor=1.0)
    expect_close(mean, wanted.sum() / weight[labels].sum(), "weighted mean loss", floor=1.0)
    expect_close(weight, subject.class_weight(), "weight after the call")


@check
def ignore_index_skips_rows(subject: Subject) -> None:
    """Rows with the label ``ignore_index`` have no loss and no gradient and do not count in the mean, even if NaN."""
    subject.require("ignore_index")
    logits, labels = subject.logits(), subject.labels()
    broken = logits.clone()
    broken[1] = torch.nan
    kept = torch.tensor([0, 2, 3])
    for index in (-100, int(labels[1])):
        loss = subject.build(ignore_index=index)
        marked = labels.clone()
        marked[1] = index
        _, gradient = value_and_gradient(loss, logits, marked)
        expect(not gradient[1].any(), f"expected no gradient on a row with ignore_index = {index}, got {gradient[1]}")
        subject.expect_same_value(
            lambda loss=loss, marked=marked: loss(logits, marked),
            lambda loss=loss: loss(logits[kept], labels[kept]),
            f"loss with a row of ignore_index = {index}",
        )
        subject.expect_same_value(
            lambda loss=loss, marked=marked: loss(broken, marked),
            lambda loss=loss, marked=marked: loss(logits, marked),
            f"loss with NaN in a row of ignore_index = {index}",
        )


@check
def label_smoothing_is_a_soft_target(subject: Subject) -> None:
    """``label_smoothing=e`` equals the dense target (1 - e) one-hot + e/n, with class weights too."""
    subject.require("label_smoothing", "reduction")
    logits, labels, n = subject.logits(), subject.labels(), subject.num_classes
    target = 0.9 * subject.one_hot(labels) + 0.1 / n
    for weight in (None, subject.class_weight()) if subject.takes("weight") else (None,):
        common = {"reduction": "none", "weight": weight} if subject.takes("weight") else {"reduction": "none"}
        value, gradient = value_and_gradient(subject.build(label_smoothing=0.1, **common), logits, labels)
        wanted, wanted_gradient = value_and_gradient(subject.build(label_smoothing=0.0, **common), logits, target)
        expect_close(value, wanted, "loss with label_smoothing", floor=1.0)
        expect_close(gradient, wanted_gradient, "gradient with label_smoothing")


@check
def tuning_grid_can_be_tried(subject: Subject) -> None:
    """A ``tuning_grid`` has options of the loss, with values that give a finite loss."""
    grid = tuning_grid(subject.factory)
    if not grid:
        raise NotApplicableError("declares no tuning_grid")
    for option, values in grid.items():
        expect(subject.takes(option), f"expected options of the loss in tuning_grid, got {option!r}")
        expect(bool(values), f"expected values of {option} in tuning_grid, got none")
        for value in values:
            loss = evaluate(subject.build(**{option: value}), subject.logits(), subject.labels())
            expect(bool(loss.isfinite().all()), f"expected a finite loss with {option}={value!r}, got {loss}")


@check
def option_ranges_are_kept(subject: Subject) -> None:
    """``option_ranges`` contain the default and the tuning grid. Values outside raise a ValueError."""
    ranges, grid = option_ranges(subject.factory), tuning_grid(subject.factory)
    if not ranges:
        raise NotApplicableError("declares no option_ranges")
    for option, values in ranges.items():
        expect(subject.takes(option), f"expected options of the loss in option_ranges, got {option!r}")
        default = parameters(subject.factory)[0][option].default
        usual = [] if default is inspect.Parameter.empty else [default]
        for value in [*usual, *grid.get(option, ())]:
            if isinstance(value, (int, float, str)):  # None and lists per class are not single numbers
                expect(value in values, f"expected {option}={value!r} in {values}, as its default or grid has it")
        n = subject.num_classes
        for value in values.inside(n) if isinstance(values, Interval) else values:
            loss = evaluate(subject.build(**{option: value}), subject.logits(), subject.labels())
            expect(bool(loss.isfinite().all()), f"expected a finite loss with {option}={value!r}, got {loss}")
        for value in values.outside(n) if isinstance(values, Interval) else ("no such choice",):
            expect(_is_refused(subject, option, value), f"expected a ValueError for {option}={value!r}, got a loss")


def _is_refused(subject: Subject, option: str, value: Any) -> bool:
    try:
        evaluate(subject.build(**{option: value}), subject.logits(), subject.labels())
    except ValueError:
        return True
    return False


@check
def options_can_be_set(subject: Subject) -> None:
    """Temperatures are annealed by setting an option. Later calls must use the new value, or setting must raise."""
    logits, labels = subject.logits(), subject.labels()
    for option, value in other_values(subject):
        loss = subject.build()
        if not isinstance(loss, ClassificationLoss) and not hasattr(loss, option):
            continue  # a plain module has no list of options
        evaluate(_at_epoch(loss), logits, labels)  # a kernel may cache values
        try:
            setattr(loss, option, value)
        except (ValueError, TypeError, AttributeError):
            continue
        built = _at_epoch(subject.build(**{option: value}))
        wanted, got = value_and_gradient(built, logits, labels), value_and_gradient(loss, logits, labels)
        for kind, mine, its in zip(("loss", "gradient"), got, wanted, strict=True):
            expect_close(mine, its, f"{kind} after {option} was set to {value!r}", tolerance=0.0)
        expect(repr(loss) == repr(built), f"expected {built!r} after {option} was set to {value!r}, got {loss!r}")


def other_values(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Yield options with further values with which the loss can be built."""
    n, ranges, grid = subject.num_classes, option_ranges(subject.factory), tuning_grid(subject.factory)
    common = {
        "reduction": ["sum", "none"],
        "label_smoothing": [0.25, 0.5, 0.125],
        "ignore_index": [int(subject.labels()[0])],
    }
    common |= {"k": [2, 3], "weight": [subject.class_weight()], "class_counts": [list(range(1, n + 1))]}
    parameters = inspect.signature(subject.factory).parameters
    for option in filter(subject.takes, parameters):
        allowed, usual = ranges.get(option), subject.options.get(option, parameters[option].default)
        values = [*common.get(option, ()), *grid.get(option, ())]
        if isinstance(allowed, tuple):
            values += allowed
        elif isinstance(usual, bool):
            values.append(not usual)
        elif isinstance(usual, (int, float)):
            values += [usual + 1, 0.75 * usual, 0.625 * usual] if isinstance(usual, float) else [usual + 1]
        for value in values:
            if not isinstance(value, torch.Tensor) and value == usual:
                continue
            try:
                evaluate(_at_epoch(subject.build(**{option: value})), subject.logits(), subject.labels())
            except (ValueError, TypeError, RuntimeError):
                continue
            yield option, value


def _at_epoch(loss: Loss) -> Loss:
    """Set epoch 0 if the loss has a schedule, as a trainer does."""
    if callable(set_epoch := getattr(loss, "set_epoch", None)):
        set_epoch(0)
    return loss


@check
def set_epoch_is_harmless(subject: Subject) -> None:
    """A trainer calls ``set_epoch`` before each epoch. ``first_change`` is the first epoch with another loss."""
    loss = subject.build()
    set_epoch = getattr(loss, "set_epoch", None)
    if not callable(set_epoch):
        raise NotApplicableError("has no set_epoch")
    values = []
    for epoch in range(EPOCHS):
        set_epoch(epoch)
        value, gradient = value_and_gradient(loss, subject.logits(), subject.labels())
        expect(
            bool(value.isfinite() & gradient.isfinite().all()), f"expected a finite loss in epoch {epoch}, got {value}"
        )
        values.append(value)
    if isinstance(loss, ClassificationLoss):
        changed = next((epoch for epoch, value in enumerate(values) if not torch.equal(value, values[0])), EPOCHS)
        declared = loss.first_change
        expect(
            (EPOCHS if declared is None else min(declared, EPOCHS)) == changed,
            f"expected first_change = {None if changed == EPOCHS else changed}, the first epoch whose loss is not that "
            f"of epoch 0, got {declared}",
        )
