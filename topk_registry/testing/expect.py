"""How a check speaks: it fails with what was expected and what came, or says why it does not apply."""

from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import SkipTest

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


class CheckFailedError(AssertionError):
    """The loss does not do what the check expects."""


class NotApplicableError(SkipTest):
    """The check does not apply to this loss; pytest skips it."""


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
    right, wrong, difference = (x.flatten()[worst].item() for x in (wanted, got, got - wanted))
    raise CheckFailedError(
        f"expected {what}{place} = {right:.6g}, got {wrong:.6g} (difference {difference:.3g}, allowed {allowed:.1g})"
    )


def expect_same(
    got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], what: str, tolerance: float | None = None
) -> None:
    """Raise unless two pairs of a loss and its gradient are close."""
    __tracebackhide__ = True
    expect_close(got[0], wanted[0], f"loss {what}", tolerance=tolerance, floor=1.0)
    expect_close(got[1], wanted[1], f"gradient {what}", tolerance=tolerance)


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
