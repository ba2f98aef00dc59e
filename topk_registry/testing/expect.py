"""How a check speaks: it fails with what was expected and what came, or says why it does not apply."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from topk_registry.testing.subject import Subject

Check = Callable[["Subject"], None]

# A loss is a chain of some tens of operations, each rounding by half an eps of the largest value on its way.
ROUNDINGS = 64

CHECKS: dict[str, Check] = {}  # in the order in which they run


def check(function: Check) -> Check:
    """Decorate a check, which belongs to the kit from then on."""
    CHECKS[function.__name__] = function
    return function


def of_rows(function: Check) -> Check:
    """Mark a check of what a loss is for one row: it does not apply to a loss of the batch as a whole."""
    return _unless(lambda subject: subject.is_of_batch, "is a loss of the batch as a whole", function)


def of_exact_gradients(function: Check) -> Check:
    """Mark a check that the gradient is the value's own: it does not apply to a loss that says it is an estimate."""
    return _unless(lambda subject: subject.estimates_gradient, "says that its gradient is an estimate", function)


def _unless(condition: Callable[["Subject"], bool], why: str, function: Check) -> Check:
    @functools.wraps(function)
    def applied(subject: "Subject") -> None:
        __tracebackhide__ = True
        if condition(subject):
            raise NotApplicableError(why)
        function(subject)

    return applied


class CheckFailedError(AssertionError):
    """The loss does not do what the check expects."""


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
    """Raise unless got equals wanted within tolerance times wanted's largest entry, or times floor where that is more.

    The largest entry is the yardstick because small entries come from sums in which it takes part. NaN equals NaN.
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
    """Two numbers in as many digits as tell them apart."""
    texts: Iterator[tuple[str, str]] = ((f"{right:.{n}g}", f"{wrong:.{n}g}") for n in range(6, 18))
    return next((pair for pair in texts if pair[0] != pair[1]), (f"{right:.6g}", f"{wrong:.6g}"))


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
