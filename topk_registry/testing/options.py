"""Checks of options: the options of ``torch.nn.CrossEntropyLoss`` must have the same meaning in the loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from topk_registry.losses.adjustable import Option
from topk_registry.losses.base import ClassificationLoss
from topk_registry.registry.ranges import Interval, option_ranges
from topk_registry.registry.signatures import CONTEXT, parameters, tuning_grid
from topk_registry.testing.expect import NotApplicableError, check, expect, expect_close, expect_finite, expect_same
from topk_registry.testing.subject import EPOCHS, Subject, evaluate, value_and_gradient


@check
def reduction_is_consistent(subject: Subject) -> None:
    """Check that "none" returns losses [B], "sum" their sum and "mean" their mean. Other values raise a ValueError."""
    subject.require("reduction")
    logits, labels = subject.logits(), subject.labels()
    plain = {"weight": None} if subject.takes("weight") else {}
    rows, total, mean = (evaluate(subject.build(reduction=r, **plain), logits, labels) for r in ("none", "sum", "mean"))
    expect(
        rows.shape == labels.shape,
        f"reduction='none' must give a loss of shape {list(labels.shape)}, got {list(rows.shape)}",
    )
    expect_close(total, rows.sum(), "loss of reduction 'sum'", floor=1.0)
    expect_close(mean, rows.mean(), "loss of reduction 'mean'", floor=1.0)
    expect(_is_refused(subject, "reduction", "average"), "expected a ValueError for reduction='average', got a loss")


@check
def weights_scale_rows(subject: Subject) -> None:
    """Check that ``weight`` and ``sample_weight`` multiply losses, and "mean" divides by the sum of the factors."""
    subject.require("weight", "reduction")
    logits = subject.logits()
    labels = subject.labels()
    weight = subject.class_weight()
    hard = {"label_smoothing": 0.0} if subject.takes("label_smoothing") else {}
    plain = evaluate(subject.build(weight=None, reduction="none", **hard), logits, labels)
    rows, mean = (evaluate(subject.build(weight=weight, reduction=r, **hard), logits, labels) for r in ("none", "mean"))
    wanted = plain * weight[labels]
    expect_close(rows, wanted, "loss of weighted rows", floor=1.0)
    expect_close(mean, wanted.sum() / weight[labels].sum(), "weighted mean loss", floor=1.0)
    expect_close(weight, subject.class_weight(), "weight after the call")
    loss: Any = subject.build(weight=weight, **hard)
    if isinstance(loss, ClassificationLoss) and not subject.is_random:
        labels, own = labels.clone(), logits[:, 0].abs() + 0.5
        labels[2] = loss.ignore_index
        factors = own * weight[labels.clamp(min=0)] * (labels >= 0)
        got = loss(logits, labels, sample_weight=own)
        expect_close(got, (plain * factors).sum() / factors.sum(), "mean of rows with a sample_weight", floor=1.0)


@check
def ignore_index_skips_rows(subject: Subject) -> None:
    """Check that the loss skips samples with the label ``ignore_index``, even if their logits contain NaN.

    The gradient of a skipped sample is 0. If the loss skips all samples, the gradient is 0, as in cross-entropy.
    """
    subject.require("ignore_index")
    logits, labels = subject.logits(), subject.labels()
    broken = logits.index_fill(0, torch.tensor(1), torch.nan)
    kept = torch.tensor([0, 2, 3])
    for index in (-100, int(labels[1])):
        loss = subject.build(ignore_index=index)
        marked = labels.index_fill(0, torch.tensor(1), index)
        _, gradient = value_and_gradient(loss, logits, marked)
        expect(not gradient[1].any(), f"expected no gradient on a row with ignore_index = {index}, got {gradient[1]}")
        _, gradient = value_and_gradient(loss, logits, torch.full_like(labels, index))
        expect(not gradient.any(), f"expected no gradient if all rows have ignore_index = {index}, got {gradient}")
        for scores, what in ((logits, "a row"), (broken, "NaN in a row")):
            subject.expect_same_value(
                lambda loss=loss, x=scores, y=marked: loss(x, y),
                lambda loss=loss: loss(logits[kept], labels[kept]),
                f"loss with {what} of ignore_index = {index}",
            )


@check
def label_smoothing_is_a_soft_target(subject: Subject) -> None:
    """Check that ``label_smoothing=e`` gives the same loss as the target distribution (1 - e) one_hot + e / n."""
    subject.require("label_smoothing", "reduction")
    logits = subject.logits()
    labels = subject.labels()
    n = subject.num_classes
    target = 0.9 * subject.one_hot(labels) + 0.1 / n
    for weight in (None, subject.class_weight()) if subject.takes("weight") else (None,):
        common = {"reduction": "none", "weight": weight} if subject.takes("weight") else {"reduction": "none"}
        got = value_and_gradient(subject.build(label_smoothing=0.1, **common), logits, labels)
        wanted = value_and_gradient(subject.build(label_smoothing=0.0, **common), logits, target)
        expect_same(got, wanted, "with label_smoothing")


@check
def declared_options_work(subject: Subject) -> None:
    """Check that options accept the values in ``loss.tuning_grid`` and the ends of their range, and reject others."""
    ranges, grid = option_ranges(subject.factory), tuning_grid(subject.factory)
    if not ranges and not grid:
        raise NotApplicableError("states no allowed values and no tuning_grid")
    taken, n = parameters(subject.factory)[0], subject.num_classes
    for option in {**ranges, **grid}:
        expect(option in taken, f"expected options of the loss in tuning_grid, got {option!r}")
        expect(bool(grid.get(option, True)), f"expected values of {option} in tuning_grid, got none")
        usual, allowed = [*grid.get(option, ())], ranges.get(option, ())
        inside, outside = allowed.examples(n) if isinstance(allowed, Interval) else (allowed, ["no such choice"])
        types = Option.of(taken[option].annotation, None).types
        if Tensor in types and float not in types:  # one number per class; a loss may be NaN if all of them are 0
            inside = []
            outside = [[value] * n for value in outside]
        for value in [*usual, *inside]:
            expect_finite(_loss_with(subject, option, value), f"loss with {option}={value!r}")
        if option in ranges:
            for value in [taken[option].default, *usual]:
                if isinstance(value, (int, float, str)):  # None and lists per class are not single numbers
                    expect(value in allowed, f"expected {option}={value!r} in {allowed}, as its default or grid has it")
            for value in outside:
                refused = _is_refused(subject, option, value)
                expect(refused, f"expected a ValueError for {option}={value!r}, got a loss")


def _loss_with(subject: Subject, option: str, value: Any) -> Tensor:
    return evaluate(subject.build(**{option: value}), subject.logits(), subject.labels())


def _is_refused(subject: Subject, option: str, value: Any) -> bool:
    try:
        _loss_with(subject, option, value)
    except ValueError:
        return True
    return False


@check
def options_can_be_set(subject: Subject) -> None:
    """Check that an assignment such as ``loss.tau = 0.3`` has an effect on all later calls, or raises an error."""
    logits, labels = subject.logits(), subject.labels()
    for option, value in _other_values(subject):
        loss = subject.build()
        if not isinstance(loss, ClassificationLoss) and not hasattr(loss, option):
            continue  # the module does not store this option
        evaluate(loss, logits, labels)  # this call may fill a cache, which the new value must invalidate
        try:
            setattr(loss, option, value)
        except (ValueError, TypeError, AttributeError):
            continue
        built = subject.build(**{option: value})
        got, wanted = (value_and_gradient(each, logits, labels) for each in (loss, built))
        expect_same(got, wanted, f"after {option} was set to {value!r}", tolerance=0.0)
        expect(repr(loss) == repr(built), f"expected {built!r} after {option} was set to {value!r}, got {loss!r}")


def _other_values(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Yield (option, value) for values that the loss accepts and that differ from the value in use."""
    ranges, grid = option_ranges(subject.factory), tuning_grid(subject.factory)
    common = {"weight": [subject.class_weight()], "ignore_index": [int(subject.labels()[0])]}
    taken = parameters(subject.factory)[0]
    for option in [name for name in taken if name not in CONTEXT]:
        usual, allowed = subject.options.get(option, taken[option].default), ranges.get(option)
        choices = allowed if isinstance(allowed, tuple) else ()
        values = [*common.get(option, ()), *grid.get(option, ()), *choices]
        if isinstance(usual, bool):
            values.append(not usual)
        elif isinstance(usual, (int, float)):
            values += [usual + 1] if isinstance(usual, int) else [usual + 1, 0.75 * usual, usual + 0.125]
        for value in values:
            if not isinstance(value, Tensor) and value == usual:
                continue
            try:
                _loss_with(subject, option, value)
            except Exception:
                continue
            yield option, value


@check
def set_epoch_is_harmless(subject: Subject) -> None:
    """Check that the loss is finite in all epochs, and first changes in the epoch that ``loss.first_change`` names."""
    loss = subject.build()
    set_epoch = getattr(loss, "set_epoch", None)
    if not callable(set_epoch):
        raise NotApplicableError("has no set_epoch")
    values = []
    for epoch in range(EPOCHS):
        set_epoch(epoch)
        value, gradient = value_and_gradient(loss, subject.logits(), subject.labels())
        expect_finite(torch.cat([value[None], gradient.flatten()]), f"loss and gradient in epoch {epoch}")
        values.append(value)
    if isinstance(loss, ClassificationLoss):
        changed = next((epoch for epoch, value in enumerate(values) if not torch.equal(value, values[0])), None)
        declared = None if loss.first_change is None or loss.first_change >= EPOCHS else loss.first_change
        expect(
            declared == changed,
            f"expected first_change = {changed}, the first epoch whose loss is not that of epoch 0, got {declared}",
        )
