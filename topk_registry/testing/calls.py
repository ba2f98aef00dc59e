"""The call itself: what comes out, and what must not happen on the way."""

from collections.abc import Iterator

import torch
from torch import Tensor

from topk_registry.testing.expect import check, expect, expect_close, expect_finite
from topk_registry.testing.subject import Subject, evaluate, value_and_gradient


@check
def returns_differentiable_scalar(subject: Subject) -> None:
    """A training step calls ``loss(logits, target).backward()``."""
    logits = subject.logits().requires_grad_()
    value = evaluate(subject.build(), logits, subject.labels())
    expect(isinstance(value, Tensor), f"expected a torch.Tensor, got {type(value).__name__}")
    expect(value.ndim == 0, f"expected a 0-dim tensor by default, got shape {list(value.shape)}")
    expect_finite(value, "loss")
    expect(value.requires_grad, "expected a loss that requires grad, got one cut off from the logits")
    value.backward()
    expect(logits.grad is not None, "expected a gradient on the logits, got none")


@check
def keeps_the_precision(subject: Subject) -> None:
    """Double precision is asked for where digits count; a loss that goes through float32 on the way loses them."""
    loss = subject.build()
    for dtype in (torch.float64, torch.float32):
        logits, name = subject.logits(dtype=dtype), str(dtype).removeprefix("torch.")
        for kind, target in subject.targets(loss):
            value = evaluate(loss, logits, target)
            got = str(value.dtype).removeprefix("torch.")
            expect(value.dtype == dtype, f"{name} logits must give a {name} loss of {kind}, got {got}")


@check
def prefers_the_label(subject: Subject) -> None:
    """A minimiser must be drawn towards the label: it scores last in one batch, first in the other."""
    label = subject.labels()
    first = 4 * subject.one_hot(label)
    best, worst = (evaluate(subject.build(), logits, label).item() for logits in (first, 4 - first))
    expect(best < worst, f"expected less loss with the label first ({best:.6g}) than with the label last ({worst:.6g})")


@check
def repeats_under_a_seed(subject: Subject) -> None:
    """An experiment can be repeated only if torch.manual_seed fixes whatever is drawn."""
    logits, labels = subject.logits(), subject.labels()
    first, second = (evaluate(subject.build(), logits, labels) for _ in range(2))
    expect(torch.equal(first, second), f"expected the same loss under the same seed, got {first} and {second}")


@check
def leaves_inputs_alone(subject: Subject) -> None:
    """The logits are logged and the target reused after the loss; whatever they held they still hold."""
    loss = subject.build()
    for _, target in subject.targets(loss):
        if not isinstance(target, Tensor):
            continue
        logits = subject.logits()
        logits_before, target_before = logits.clone(), target.clone()
        evaluate(loss, logits, target)
        expect(torch.equal(logits, logits_before), "expected the logits unchanged, got them written to")
        expect(torch.equal(target, target_before), "expected the target unchanged, got it written to")


@check
def works_without_grad(subject: Subject) -> None:
    """Validation runs under inference_mode or no_grad, and gives the value that training gives."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    wanted, _ = value_and_gradient(loss, logits, labels)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expect_close(evaluate(loss, logits, labels), wanted, f"loss under {mode.__name__}", floor=1.0)
    expect_close(evaluate(loss, logits, labels), wanted, "loss of logits that require no grad", floor=1.0)


@check
def accepts_any_strides(subject: Subject) -> None:
    """Scores and targets come transposed, sliced or expanded; a kernel that assumes strides reads the wrong numbers."""
    loss, labels, logits = subject.build(), subject.labels(), subject.logits()
    cases = [(f"{kind} logits", strange, labels) for kind, strange in _layouts(logits)]
    targets = [target for _, target in subject.targets(loss) if isinstance(target, Tensor)]
    cases += [(f"{kind} targets", logits, strange) for target in targets for kind, strange in _layouts(target)]
    for what, x, y in cases:
        plain = x.contiguous(), y.contiguous()
        subject.expect_same_value(lambda p=plain: loss(*p), lambda p=(x, y): loss(*p), f"loss of {what}")
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(evaluate(loss, leaf, y), leaf)
        if not subject.is_random:  # random numbers may be drawn in the order of memory
            expect_close(gradient, value_and_gradient(loss, *plain)[1], f"gradient of {what}")


def _layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views of the numbers of x that lie otherwise in memory."""
    yield "strided", torch.stack([x, x.roll(1, 0)], dim=-1)[..., 0]
    yield "every other", torch.stack([x.roll(1, 0), x], dim=1).flatten(0, 1)[1::2]
    yield "expanded", x[:1].expand_as(x)
    if x.ndim > 1:
        yield "transposed", x.t().contiguous().t()
