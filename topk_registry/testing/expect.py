"""Outcomes of a check: it fails with expected and actual value, or it does not apply for a reason."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from topk_registry.testing.subject import Subject

Check = Callable[["Subject"], None]

# A loss is a chain of some tens of operations. Each rounds by half an eps of the largest intermediate value.
ROUNDINGS = 64

CHECKS: dict[str, Check] = {}  # in the order of execution


def check(function: Check) -> Check:
    """Register a function as a check of the kit."""
    CHECKS[function.__name__] = function
    return function


def of_rows(function: Check) -> Check:
    """Mark a check that does not apply to losses that are defined on a whole batch."""
    return _unless(lambda subject: subject.is_of_batch, "is defined on a whole batch", function)


def of_exact_gradients(function: Check) -> Check:
    """Mark a check that does not apply to losses that declare their gradient as an estimate."""
    return _unless(lambda subject: subject.estimates_gradient, "declares that its gradient is an estimate", function)


def _unless(condition: Callable[["Subject"], bool], why: str, function: Check) -> Check:
    @functools.wraps(function)
    def applied(subject: "Subject") -> None:
        __tracebackhide__ = True
        if condition(subject):
            raise NotApplicableError(why)
        function(subject)

    return applied


class CheckFailedError(AssertionError):
    """The loss does not meet the expectation of a check."""


class NotApplicableError(Exception):
    """The check does not apply to this loss."""


def expect(condition: bool | Tensor, message: str) -> None:
    __tracebackhide__ = True
    if not condition:
        raise CheckFailedError(message)


def expect_finite(got: Tensor, what: str) -> None:
    __tracebackhide__ = True
    wrong = ~got.isfinite()
    if wrong.any():
        raise CheckFailedError(
            f"expected a finite {what}, got {got[wrong][0].item()} in {int(wrong.sum())} of its entries"
        )


def expect_close(got: Tensor, wanted: Tensor, what: str, *, tolerance: float | None = None, floor: float = 0.0) -> None:
    """Raise unless got equals wanted within tolerance times the larger of ``floor`` and wanted's largest entry.

    The tolerance is relative to the largest entry, because small entries are sums of large ones. NaN equals NaN.
    """
    __tracebackhide__ = True
    expect(got.shape == wanted.shape, f"expected {what} of shape {list(wanted.shape)}, got {list(got.shape)}")
    if tolerance is None:
        tolerance = ROUNDINGS * torch.finfo(wanted.dtype).eps
    got, wanted = got.detach().double(), wanted.detach().double()
    allowed = tolerance * max(floor, _largest(wanted))
    apart = (got - wanted).abs().masked_fill((got == wanted) | (got.isnan() & wanted.isnan()), 0.0)
    if (apart <= allowed).all():
        return
    worst = int(apart.nan_to_num(nan=torch.inf).argmax())
    place = f" at {[int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]}" if got.ndim else ""
    right, wrong = _apart(wanted.flatten()[worst].item(), got.flatten()[worst].item())
    raise CheckFailedError(f"expected {what}{place} = {right}, got {wrong} (allowed difference {allowed:.1g})")


def _apart(right: float, wrong: float) -> tuple[str, str]:
    """Format two numbers with enough digits to distinguish them."""
    texts: Iterator[tuple[str, str]] = ((f"{right:.{n}g}", f"{wrong:.{n}g}") for n in range(6, 18))
    return next((pair for pair in texts if pair[0] != pair[1]), (f"{right:.6g}", f"{wrong:.6g}"))


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
