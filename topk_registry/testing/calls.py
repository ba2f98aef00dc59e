"""Checks of a call: return value, unwanted side effects, and the independence of the rows of a batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from topk_registry.ops.masses import Target
from topk_registry.testing.expect import check, expect, expect_close, expect_finite
from topk_registry.testing.subject import BATCH, Loss, Subject, evaluate, value_and_gradient

BROKEN = 1  # index of the row whose logits are set to NaN


@check
def returns_differentiable_scalar(subject: Subject) -> None:
    """Check that the loss is a finite scalar tensor with a gradient with respect to the logits, as training needs."""
    logits = subject.logits().requires_grad_()
    value = evaluate(subject.build(), logits, subject.labels())
    expect(isinstance(value, Tensor), f"expected a torch.Tensor, got {type(value).__name__}")
    expect(value.ndim == 0, f"expected a 0-dim tensor by default, got shape {list(value.shape)}")
    expect(value.dtype == logits.dtype, f"expected a float32 loss of float32 logits, got {value.dtype}")
    expect_finite(value, "loss")
    expect(value.requires_grad, "expected a loss that requires grad, got one cut off from the logits")
    value.backward()
    expect(logits.grad is not None, "expected a gradient on the logits, got none")


@check
def prefers_the_label(subject: Subject) -> None:
    """Check that the loss is smaller if the label has the largest logit than if the label has the smallest logit."""
    label = subject.labels()
    first = 4 * subject.one_hot(label)
    best, worst = (evaluate(subject.build(), logits, label).item() for logits in (first, 4 - first))
    expect(best < worst, f"expected less loss with the label first ({best:.6g}) than with the label last ({worst:.6g})")


@check
def repeats_under_a_seed(subject: Subject) -> None:
    """Check that ``torch.manual_seed`` determines all random numbers of the loss, so that runs can be reproduced."""
    logits, labels = subject.logits(), subject.labels()
    first, second = (evaluate(subject.build(), logits, labels) for _ in range(2))
    expect(torch.equal(first, second), f"expected the same loss under the same seed, got {first} and {second}")


@check
def leaves_inputs_alone(subject: Subject) -> None:
    """Check that the loss does not change logits and targets, because a trainer uses both again after the loss."""
    loss = subject.build()
    for _, target in subject.targets(loss):
        if isinstance(target, Tensor):
            logits, before = subject.logits(), target.clone()
            evaluate(loss, logits, target)
            expect(torch.equal(logits, subject.logits()), "expected the logits unchanged, got them written to")
            expect(torch.equal(target, before), "expected the target unchanged, got it written to")


@check
def works_without_grad(subject: Subject) -> None:
    """Check that the loss has the same value under ``no_grad`` and ``inference_mode``, where validation runs."""
    loss, logits, labels = subject.example()
    wanted, _ = value_and_gradient(loss, logits, labels)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expect_close(evaluate(loss, logits, labels), wanted, f"loss under {mode.__name__}", floor=1.0)
    expect_close(evaluate(loss, logits, labels), wanted, "loss of logits without requires_grad", floor=1.0)


@check
def accepts_any_strides(subject: Subject) -> None:
    """Check that the results do not change if logits or targets are transposed, strided or expanded in memory."""
    loss, logits, labels = subject.example()
    cases = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        cases += [(f"{kind} logits in {dtype}", x, labels) for kind, x in _layouts(subject.logits(dtype=dtype))]
    targets = [target for _, target in subject.targets(loss) if isinstance(target, Tensor)]
    cases += [(f"{kind} targets", logits, strange) for target in targets for kind, strange in _layouts(target)]
    for what, x, y in cases:
        plain = x.contiguous(), y.contiguous()
        subject.expect_same_value(lambda p=plain: loss(*p), lambda p=(x, y): loss(*p), f"loss of {what}")
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(evaluate(loss, leaf, y), leaf)
        if not subject.is_random:  # random numbers may depend on the memory layout
            expect_close(gradient, value_and_gradient(loss, *plain)[1], f"gradient of {what}")


def _layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name of a memory layout, x in this layout). In the layout "expanded", all rows are row 0 of x."""
    yield "strided", torch.stack([x, x.roll(1, 0)], dim=-1)[..., 0]
    yield "every other", torch.stack([x.roll(1, 0), x], dim=1).flatten(0, 1)[1::2]
    yield "expanded", x[:1].expand_as(x)
    if x.ndim > 1:
        yield "transposed", x.t().contiguous().t()
        yield "sliced", torch.cat([x, x], dim=1)[:, : x.shape[1]]


@check
def row_order_is_irrelevant(subject: Subject) -> None:
    """Check that a permutation of the rows of a batch does not change the loss."""
    subject.needs_rows()
    loss, logits, labels = subject.example()
    order = torch.tensor([2, 0, 3, 1])
    subject.expect_same_value(
        lambda: loss(logits, labels), lambda: loss(logits[order], labels[order]), "loss of the shuffled batch"
    )


@check
def nan_stays_in_its_row(subject: Subject) -> None:
    """Check that if one sample has NaN logits, the batch loss is NaN, and only this sample has a NaN gradient."""
    subject.needs_rows()
    logits, labels = subject.logits(), subject.labels()
    places = {
        "a whole row of NaN": torch.arange(subject.num_classes),
        "NaN at the label": labels[BROKEN],
        "NaN at the largest of the other logits": logits[BROKEN].index_fill(0, labels[BROKEN], -torch.inf).argmax(),
        "NaN at the smallest of the other logits": logits[BROKEN].index_fill(0, labels[BROKEN], torch.inf).argmin(),
    }
    loss = subject.build()
    cases = [(loss, kind, target) for kind, target in subject.targets(loss)]
    if subject.takes("label_smoothing"):
        cases.append((subject.build(label_smoothing=0.1), "smoothed labels", labels))
    for each, kind, target in cases:
        _, wanted = value_and_gradient(each, logits, target)
        for where, classes in places.items():
            _expect_nan(each, logits, target, classes, wanted, f"{where} and {kind}")


def _expect_nan(loss: Loss, logits: Tensor, target: Target, classes: Tensor, wanted: Tensor, what: str) -> None:
    broken, others = logits.clone(), torch.arange(BATCH) != BROKEN
    broken[BROKEN, classes] = torch.nan
    value, gradient = value_and_gradient(loss, broken, target)
    expect(bool(value.isnan()), f"expected a NaN loss for {what}, got {value.item():.6g}")
    expect_close(gradient[others], wanted[others], f"gradient of the other rows with {what}")
    own = gradient[BROKEN]
    expect(bool(own.isnan().any()), f"expected NaN in the gradient of the row with {what}, got {own}")


@check
def infinity_stays_in_its_row(subject: Subject) -> None:
    """Check that with a logit of +inf, NaN in the gradient of a sample shows in its loss, and the reverse.

    If the gradient has NaN, the loss must not be finite. If the loss is NaN, the gradient must have NaN. The gradients
    of the other samples must not change. Logits become infinite if they overflow in half precision.
    """
    subject.needs_rows()
    loss, logits, labels = subject.example()
    another = logits[BROKEN].index_fill(0, labels[BROKEN], torch.inf).argmin()
    for kind, target in subject.targets(loss):
        _, wanted = value_and_gradient(loss, logits, target)
        for where, class_ in (("the label", labels[BROKEN]), ("another class", another)):
            broken = logits.clone()
            broken[BROKEN, class_] = torch.inf
            value, gradient = value_and_gradient(loss, broken, target)
            what = f"with a logit of +inf at {where} and {kind}"
            others = torch.arange(BATCH) != BROKEN
            expect_close(gradient[others], wanted[others], f"gradient of the other rows {what}")
            message = f"expected NaN in both loss and gradient or in neither {what}, got {value} and {gradient[BROKEN]}"
            is_broken = bool(gradient[BROKEN].isnan().any())
            expect(not value.isfinite() if is_broken else not value.isnan(), message)


@check
def batch_of_one(subject: Subject) -> None:
    """Check that the loss works for a batch of one sample, because the last batch of an epoch may have one sample."""
    subject.needs_rows()
    loss = subject.build()
    logits = subject.logits()[:1]
    labels = subject.labels()[:1]
    copies, copied = logits.repeat(BATCH, 1), labels.repeat(BATCH)
    value, gradient = value_and_gradient(loss, logits, labels)
    expect(value.ndim == 0, f"expected a 0-dim loss of one row, got shape {list(value.shape)}")
    expect_finite(gradient, "gradient of one row")
    # BATCH copies of a row have the loss of one row if the loss is a mean, and BATCH times this loss if it is a sum
    rows = BATCH if evaluate(loss, copies, copied).abs() > 2 * value.abs() else 1
    subject.expect_same_value(
        lambda: loss(logits, labels) * rows, lambda: loss(copies, copied), f"loss of {BATCH} copies of a row"
    )


@check
def averages_the_batch(subject: Subject) -> None:
    """Check that twice the batch does not give twice the loss: trainers choose learning rates for a mean over rows."""
    subject.needs_rows()
    loss, logits, labels = subject.example()
    once = evaluate(loss, logits, labels).item()
    twice = evaluate(loss, logits.repeat(2, 1), labels.repeat(2)).item()
    rows = f"{once:.6g} for {BATCH} rows and {twice:.6g} for each of these rows twice"
    expect(abs(twice - 2 * once) > 0.5 * abs(once), f"expected a mean over the rows, not a sum, got {rows}")


@check
def empty_batch(subject: Subject) -> None:
    """Check that an empty batch has the loss of cross-entropy: 0 for "sum", shape [0] for "none", NaN for "mean"."""
    subject.needs_rows()
    logits, labels = subject.logits()[:0], subject.labels()[:0]
    if not subject.takes("reduction"):
        value_and_gradient(subject.build(), logits, labels)
        return
    wanted = {"none": torch.zeros(0), "sum": torch.tensor(0.0), "mean": torch.tensor(torch.nan)}
    for reduction, expected in wanted.items():
        value, gradient = value_and_gradient(subject.build(reduction=reduction), logits, labels)
        expect_close(value, expected, f"loss of an empty batch, reduction {reduction!r},")
        expect_close(gradient, logits, "gradient of an empty batch")
