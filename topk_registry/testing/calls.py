"""Checks of a call: its result, and side effects that it must not have."""

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
    """Users choose double precision if digits matter. A loss that computes in float32 inside loses these digits."""
    loss = subject.build()
    for dtype in (torch.float64, torch.float32):
        logits, name = subject.logits(dtype=dtype), str(dtype).removeprefix("torch.")
        for kind, target in subject.targets(loss):
            value = evaluate(loss, logits, target)
            got = str(value.dtype).removeprefix("torch.")
            expect(value.dtype == dtype, f"{name} logits must give a {name} loss of {kind}, got {got}")


@check
def prefers_the_label(subject: Subject) -> None:
    """The loss must be smaller if the label has the largest score than if it has the smallest."""
    label = subject.labels()
    first = 4 * subject.one_hot(label)
    best, worst = (evaluate(subject.build(), logits, label).item() for logits in (first, 4 - first))
    expect(best < worst, f"expected less loss with the label first ({best:.6g}) than with the label last ({worst:.6g})")


@check
def repeats_under_a_seed(subject: Subject) -> None:
    """Experiments can be reproduced only if torch.manual_seed determines all random numbers of the loss."""
    logits, labels = subject.logits(), subject.labels()
    first, second = (evaluate(subject.build(), logits, labels) for _ in range(2))
    expect(torch.equal(first, second), f"expected the same loss under the same seed, got {first} and {second}")


@check
def leaves_inputs_alone(subject: Subject) -> None:
    """Logits are logged and targets are reused after the loss, so the loss must not change them."""
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
    """Validation runs under inference_mode or no_grad and must return the same value as training."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    wanted, _ = value_and_gradient(loss, logits, labels)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expect_close(evaluate(loss, logits, labels), wanted, f"loss under {mode.__name__}", floor=1.0)
    expect_close(evaluate(loss, logits, labels), wanted, "loss of logits without requires_grad", floor=1.0)


@check
def accepts_any_strides(subject: Subject) -> None:
    """Scores and targets may be transposed, sliced or expanded. A kernel that assumes strides reads wrong numbers."""
    loss, labels, logits = subject.build(), subject.labels(), subject.logits()
    cases = [(f"{kind} logits", strange, labels) for kind, strange in _layouts(logits)]
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
    """Yield views of the numbers of x with other memory layouts."""
    yield "strided", torch.stack([x, x.roll(1, 0)], dim=-1)[..., 0]
    yield "every other", torch.stack([x.roll(1, 0), x], dim=1).flatten(0, 1)[1::2]
    yield "expanded", x[:1].expand_as(x)
    if x.ndim > 1:
        yield "transposed", x.t().contiguous().t()
