"""Checks of PyTorch's transforms: vmap, second derivatives, forward-mode derivatives and torch.compile."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topk_registry.testing.expect import NotApplicableError, check, expect, expect_close, expect_finite
from topk_registry.testing.subject import BATCH, SEED, Subject, evaluate, seed, value_and_gradient

# numbers.py derives the error of central differences. Here they are applied to the gradient, so the error is larger.
STEP = 1e-5
TOLERANCE = 1e-5


@check
def vmap(subject: Subject) -> None:
    """Check that ``torch.func.vmap`` gives the gradient of each row. The loss must not branch on values of a tensor."""
    subject.needs_rows()
    loss, logits = subject.build(), subject.logits()
    rows = torch.func.grad_and_value(lambda x, y: loss(x[None], y[None]))
    for kind, target in subject.targets(loss):
        if isinstance(target, Tensor):  # vmap maps over tensors
            got = _quietly(lambda y=target: torch.func.vmap(rows, randomness="different")(logits, y))
            each = [value_and_gradient(loss, logits[i : i + 1], target[i : i + 1]) for i in range(BATCH)]
            _expect_alike(subject, got[1], torch.stack([value for value, _ in each]), f"loss of {kind} under vmap")
            wanted = torch.cat([gradient for _, gradient in each])
            _expect_alike(subject, got[0], wanted, f"gradient of each row of {kind} under vmap")


@check
def second_derivative(subject: Subject) -> None:
    """Check that the second derivatives of the loss are correct, as AdaHessian and gradient penalties need."""
    subject.needs_own_gradient()
    loss, logits, labels = subject.example(torch.float64)
    direction = logits.roll(1, 0).cos()
    leaf = logits.clone().requires_grad_()
    (first,) = torch.autograd.grad(evaluate(loss, leaf, labels), leaf, create_graph=True)
    got = None
    if first.requires_grad:
        (got,) = torch.autograd.grad(first, leaf, direction, allow_unused=True)
    got = torch.zeros_like(logits) if got is None else got
    before, after = (value_and_gradient(loss, logits + h * direction, labels)[1] for h in (-STEP, STEP))
    size = first.detach().abs().max().item()
    expect_close(got, (after - before) / (2 * STEP), "second derivative", tolerance=TOLERANCE, floor=size)


@check
def forward_mode(subject: Subject) -> None:
    """Check that ``torch.func.jvp`` gives the loss and the directional derivative along a vector."""
    subject.needs_own_gradient()
    loss, logits = subject.build(), subject.logits()
    tangent = logits.roll(1, 0).cos()
    for kind, target in subject.targets(loss):
        value, got = _quietly(lambda y=target: torch.func.jvp(lambda x: loss(x, y), (logits,), (tangent,)))
        wanted, gradient = value_and_gradient(loss, logits, target)
        _expect_alike(subject, value, wanted, f"loss of {kind} in forward mode")
        size = (gradient * tangent).abs().sum().item()
        _expect_alike(subject, got, (gradient * tangent).sum(), f"directional derivative with {kind}", size)


@check
def compiles(subject: Subject) -> None:
    """Check that ``torch.compile`` does not change the results, and compiles one graph for all batch sizes."""
    from torch._dynamo.eval_frame import is_dynamo_supported

    if not is_dynamo_supported():
        raise NotApplicableError("torch.compile does not support this Python")
    graphs: list[object] = []

    def backend(graph: Callable, inputs: object) -> Callable:
        graphs.append(graph)
        return graph

    loss = subject.build()
    torch.compiler.reset()
    compiled = torch.compile(loss, dynamic=True, fullgraph=True, backend=backend)
    for batch in (BATCH, BATCH + 2, BATCH + 3):
        logits, labels = subject.logits(batch), subject.labels(batch)
        got = _quietly(lambda x=logits, y=labels: value_and_gradient(compiled, x, y))
        wanted = value_and_gradient(loss, logits, labels)
        _expect_alike(subject, got[0], wanted[0], f"compiled loss of {batch} rows")
        _expect_alike(subject, got[1], wanted[1], f"compiled gradient of {batch} rows")
    expect(len(graphs) == 1, f"expected one graph for every batch size, got {len(graphs)}")


def _quietly(call: Callable[[], Any]) -> Any:
    seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _expect_alike(subject: Subject, got: Tensor, wanted: Tensor, what: str, size: float = 1.0) -> None:
    if subject.is_random:  # a transform may use other random numbers
        expect(got.shape == wanted.shape, f"expected {what} of shape {list(wanted.shape)}, got {list(got.shape)}")
        expect_finite(got, what)
    else:
        expect_close(got, wanted, what, floor=size)
