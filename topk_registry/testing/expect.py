"""Exceptions of the conformance kit, and functions that raise an exception if a value is not the expected value."""

from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import SkipTest

import torch
from torch import Tensor

if TYPE_CHECKING:
    from topk_registry.testing.subject import Subject

Check = Callable[["Subject"], None]

# A loss is a chain of at most some tens of operations. The rounding error of each operation is at most eps / 2 times
# the largest intermediate value, where eps = torch.finfo(dtype).eps.
ROUNDINGS = 64

CHECKS: dict[str, Check] = {}  # in the order of execution


def check(function: Check) -> Check:
    """Register a function as a check of the conformance kit. The name of the function becomes the name of the check."""
    CHECKS[function.__name__] = function
    return function


class CheckFailedError(AssertionError):
    """The loss failed a check. The message has the expected and the actual value."""


class NotApplicableError(SkipTest):
    """The check does not apply to this loss. pytest reports a test with this exception as skipped."""


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
    """Raise CheckFailedError unless ``|got - wanted| <= tolerance * max(floor, max |wanted|)`` for all entries.

    NaN is equal to NaN. The default of ``tolerance`` is 64 times the eps of the dtype of ``wanted``. The error message
    names the tensor by the text ``what``.
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
    right, wrong, difference = (x.flatten()[worst].item() for x in (wanted, got, got - wanted))
    raise CheckFailedError(
        f"expected {what}{place} = {right:.6g}, got {wrong:.6g} (difference {difference:.3g}, allowed {allowed:.1g})"
    )


def expect_same(
    got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], what: str, tolerance: float | None = None
) -> None:
    """Raise CheckFailedError unless two pairs (loss, gradient) are close, see :func:`expect_close`."""
    __tracebackhide__ = True
    expect_close(got[0], wanted[0], f"loss {what}", tolerance=tolerance, floor=1.0)
    expect_close(got[1], wanted[1], f"gradient {what}", tolerance=tolerance)


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
