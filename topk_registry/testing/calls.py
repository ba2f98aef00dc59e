"""The call itself: what comes out, and what must not happen on the way."""

from collections.abc import Iterator

import torch
from torch import Tensor

from topk_registry.testing.expect import expect, expect_close, expect_finite, needs
from topk_registry.testing.subject import Subject, evaluate, value_and_gradient


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


@needs(returns_differentiable_scalar)
def keeps_the_precision(subject: Subject) -> None:
    """Double precision is asked for where digits count; a loss that goes through float32 on the way loses them."""
    loss = subject.build()
    for dtype in (torch.float64, torch.float32):
        logits, name = subject.logits(dtype=dtype), str(dtype).removeprefix("torch.")
        for kind, target in (("indices", subject.labels()), ("distributions", subject.distributions(dtype=dtype))):
            try:
                value = evaluate(loss, logits, target)
            except (ValueError, TypeError, RuntimeError, IndexError):
                if not target.is_floating_point():
                    raise  # a loss may refuse dense targets, which is another check's matter
                continue
            got = str(value.dtype).removeprefix("torch.")
            expect(value.dtype == dtype, f"{name} logits must give a {name} loss of {kind}, got {got}")


def prefers_the_label(subject: Subject) -> None:
    """A minimiser must be drawn towards the label: it scores last in one batch, first in the other."""
    label = subject.labels()
    first = 4 * subject.one_hot(label)
    best, worst = (evaluate(subject.build(), logits, label).item() for logits in (first, 4 - first))
    expect(best < worst, f"expected less loss with the label first ({best:.6g}) than with the label last ({worst:.6g})")


def repeats_under_a_seed(subject: Subject) -> None:
    """An experiment can be repeated only if torch.manual_seed fixes whatever is drawn."""
    logits, labels = subject.logits(), subject.labels()
    first, second = (evaluate(subject.build(), logits, labels) for _ in range(2))
    expect(torch.equal(first, second), f"expected the same loss under the same seed, got {first} and {second}")


def leaves_inputs_alone(subject: Subject) -> None:
    """The logits are logged and the target reused after the loss; whatever they held they still hold."""
    for target in (subject.labels(), subject.distributions()):
        logits = subject.logits()
        logits_before, target_before = logits.clone(), target.clone()
        try:
            evaluate(subject.build(), logits, target)
        except (ValueError, TypeError, RuntimeError, IndexError):
            if not target.is_floating_point():
                raise  # a loss may refuse dense targets, which is another check's matter
        expect(torch.equal(logits, logits_before), "expected the logits unchanged, got them written to")
        expect(torch.equal(target, target_before), "expected the target unchanged, got it written to")


def works_without_grad(subject: Subject) -> None:
    """Validation runs under inference_mode or no_grad, and gives the value that training gives."""
    loss, logits, labels = subject.build(), subject.logits(), subject.labels()
    wanted, _ = value_and_gradient(loss, logits, labels)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expect_close(evaluate(loss, logits, labels), wanted, f"loss under {mode.__name__}", floor=1.0)
    expect_close(evaluate(loss, logits, labels), wanted, "loss of logits that require no grad", floor=1.0)


def accepts_noncontiguous_logits(subject: Subject) -> None:
    """Scores come transposed or sliced out of larger tensors; a kernel that assumes strides reads the wrong ones."""
    loss, labels, logits = subject.build(), subject.labels(), subject.logits()
    for kind, strange in (*_layouts(logits), ("expanded", logits[:1].expand_as(logits))):
        plain = strange.contiguous()
        subject.expect_same_value(
            lambda x=plain: loss(x, labels), lambda x=strange: loss(x, labels), f"loss of {kind} non-contiguous logits"
        )
        leaf = strange.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(evaluate(loss, leaf, labels), leaf)
        if not subject.is_random:  # random numbers may be drawn in the order of memory
            _, wanted = value_and_gradient(loss, plain, labels)
            expect_close(gradient, wanted, f"gradient of {kind} non-contiguous logits")


def accepts_noncontiguous_targets(subject: Subject) -> None:
    """Labels are a column of a table or one label expanded; a kernel that reads on from the first trains on others."""
    loss, labels, logits = subject.build(), subject.labels(), subject.logits()
    dense = subject.distributions()
    targets = [*_layouts(labels), ("expanded", labels[:1].expand_as(labels)), *_layouts(dense)]
    for kind, target in targets:
        plain = target.contiguous()
        try:
            evaluate(loss, logits, plain)
        except (ValueError, TypeError, RuntimeError, IndexError):
            if not target.is_floating_point():
                raise  # a loss may refuse dense targets, which is another check's matter
            continue
        subject.expect_same_value(
            lambda y=plain: loss(logits, y), lambda y=target: loss(logits, y), f"loss of {kind} targets"
        )


def _layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of the numbers of x, or of x upside down, that lie otherwise in memory."""
    yield "strided", torch.stack([x, x.roll(1, 0)], dim=-1)[..., 0]
    yield "sliced", torch.cat([x.roll(1, 0), x])[len(x) :]
    yield "every other", torch.stack([x.roll(1, 0), x], dim=1).flatten(0, 1)[1::2]
    if x.ndim > 1:
        yield "transposed", x.t().contiguous().t()
    yield "reversed", x.flip(0).contiguous()[torch.arange(len(x) - 1, -1, -1)]


CHECKS = (
    returns_differentiable_scalar,
    keeps_the_precision,
    repeats_under_a_seed,
    prefers_the_label,
    leaves_inputs_alone,
    works_without_grad,
    accepts_noncontiguous_logits,
    accepts_noncontiguous_targets,
)
