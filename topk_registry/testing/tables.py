"""The table of a loss, L(s, c), beside the fused operator that training calls in its place."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from topk_registry.losses.base import ClassificationLoss
from topk_registry.registry.options import CONTEXT
from topk_registry.testing.expect import CheckFailedError, NotApplicableError, expect, expect_close
from topk_registry.testing.options import other_values
from topk_registry.testing.subject import Subject, evaluate

# of every loss: other checks are about them
COMMON = ("weight", "reduction", "label_smoothing", "ignore_index")
TOLERANCE = 1e-6  # of a loss in double precision: an option that is left out changes more


def fused_equals_table(subject: Subject) -> None:
    """A kernel that does not know an option of the loss trains without it; ``row_loss`` must take all of them."""
    if not _is_fused(subject.build()):
        raise NotApplicableError("has no row_loss")
    if subject.is_random:
        raise NotApplicableError("draws random numbers, which a kernel draws in its own order")
    rows = {"reduction": "none"} if subject.takes("reduction") else {}
    tried = set()
    for option, value in _settings(subject):
        tried.add(option)
        loss: Any = subject.build(**rows, **({option: value} if option else {}))
        logits, labels = subject.logits(dtype=torch.float64), subject.labels()
        at = f" at {option}={value!r}" if option else ""
        forward = evaluate(loss, logits, labels)
        for name, call in _tables(loss, logits, labels):
            try:
                expect_close(
                    forward, call().reshape(forward.shape), f"forward{at} as {name} gives", tolerance=TOLERANCE
                )
            except CheckFailedError as error:
                raise CheckFailedError(f"{error}; row_loss {_left_out(subject, loss, logits, labels)}") from None
    loss = subject.build()
    logits, labels = subject.logits(dtype=torch.float64), subject.labels()
    if loss.row_loss(logits) is not None:  # pyright: ignore[reportAttributeAccessIssue]
        missing = ", ".join(sorted(_missing(subject, loss, logits, labels) - tried))
        expect(not missing, f"expected row_loss to read every option that the table reads, got none of {missing}")


def _is_fused(loss: object) -> bool:
    return isinstance(loss, ClassificationLoss) and type(loss).row_loss is not ClassificationLoss.row_loss


def _settings(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Options with values to try, one at a time; first none, which is the loss as it is built."""
    yield "", None
    yield from ((option, value) for option, value in other_values(subject) if option not in (*COMMON, *CONTEXT))


def _tables(loss: Any, logits: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    yield "per_label", lambda: loss.per_label(logits, labels)
    yield "per_class", lambda: loss.per_class(logits).gather(1, labels[:, None])[:, 0]


def _left_out(subject: Subject, loss: Any, logits: torch.Tensor, labels: torch.Tensor) -> str:
    missing = _missing(subject, loss, logits, labels)
    return f"does not read {', '.join(sorted(missing))}" if missing else "computes another loss"


def _missing(subject: Subject, loss: Any, logits: torch.Tensor, labels: torch.Tensor) -> set[str]:
    """The options that the table reads and the fused operator does not, by name."""
    fused = _read(loss, lambda: evaluate(loss, logits, labels))
    table = set().union(*(_read(loss, call) for _, call in _tables(loss, logits, labels)))
    options = set(inspect.signature(subject.factory).parameters) - {*COMMON, *CONTEXT}
    return (table - fused) & options


def _read(loss: Any, call: Callable[[], Any]) -> set[str]:
    """The attributes of a loss that a call reads."""
    kind, seen = type(loss), set()

    class Recording(kind):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    loss.__class__ = Recording
    try:
        call()
    finally:
        loss.__class__ = kind
    return seen


CHECKS = (fused_equals_table,)
