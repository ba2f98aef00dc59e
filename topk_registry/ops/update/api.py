"""Take an optimizer's step on some rows of a matrix."""

from torch import Tensor

from topk_registry.ops.tensors import Route, route
from topk_registry.ops.update.backends import OPERATOR, State, Update


def step(rows: Tensor, gradient: Tensor, states: list[State], update: Update, first: int) -> None:
    """Change rows [m, d] and their states in place.

    Args:
        rows: part of a matrix, contiguous.
        gradient: [m, d], at least in float32.
        states: in the order of the rule's names.
        update: the rule, its settings and the random bits.
        first: place of the first row in the matrix; with the random bits' seed it decides how a number is rounded.
    """
    name = "torch"
    if _rounds(rows, states) and _is_plain(rows, gradient, states):
        name = OPERATOR.choose("auto", rows.device, rows.dtype)
    OPERATOR[name].kernels().step(rows, gradient, states, update, first)


def _rounds(rows: Tensor, states: list[State]) -> bool:
    """Whether anything is kept in less precision than the step's; else torch has a step in one pass itself."""
    return any(t.itemsize < 4 for t in (rows, *(state.values for state in states)))


def _is_plain(rows: Tensor, gradient: Tensor, states: list[State]) -> bool:
    """Whether kernels can read and write these: a matrix in one piece of memory, and no transform around it."""
    kept = [t for state in states for t in (state.values, state.scales) if t is not None]
    return rows.ndim == 2 and all(t.is_contiguous() for t in (rows, *kept)) and route(rows, gradient) is Route.KERNELS
