"""States of an optimizer in 32, 16 or 8 bits a number, under torch's names in ``optimizer.state``.

In float32 and bfloat16 a state is the tensor that torch would keep, in that precision. In 8 bits it is two tensors,
``exp_avg_codes`` and ``exp_avg_scales`` in the place of ``exp_avg``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from topk_registry.ops.update.backends import State
from topk_registry.ops.update.definition import scale_shape
from topk_registry.ops.update.torch.backend import read, write

KINDS = ("float32", "bfloat16", "int8")
CODES, SCALES = "_codes", "_scales"
POSITIVE = ("exp_avg_sq",)  # states without a sign
ROWS = 1 << 14  # rows that are converted at a time


def is_kept(state: dict[str, Any], name: str) -> bool:
    """Whether there is such a state, in any precision."""
    return name in state or name + CODES in state


def create(state: dict[str, Any], name: str, parameter: Tensor, kind: str) -> None:
    """Begin a state with zeros."""
    if kind == "int8":
        state[name + CODES] = torch.zeros(parameter.shape, dtype=torch.uint8, device=parameter.device)
        shape = scale_shape(parameter.shape)
        state[name + SCALES] = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    else:
        dtype = torch.bfloat16 if kind == "bfloat16" else wide_dtype(parameter)
        state[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def kept(state: dict[str, Any], name: str, rows: slice = slice(None)) -> State:
    """A state of some rows as it is kept."""
    if name in state:
        return State(state[name][rows])
    return State(state[name + CODES][rows], state[name + SCALES][rows], signed=name not in POSITIVE)


def converted(saved: dict[str, Any], names: tuple[str, ...], parameter: Tensor, kind: str) -> dict[str, Any]:
    """The saved state of a parameter in another precision, on its device; all that is no state of rows stays.

    Raises:
        ValueError: it is the state of another optimizer, or of another parameter.
    """
    if not saved:
        return {}
    missing = [name for name in names if not is_kept(saved, name)]
    if missing:
        raise ValueError(
            f"the saved state has no {', '.join(missing)}: expected that of the same optimizer with the same settings, "
            f"got {', '.join(saved) or 'none'}"
        )
    state = {name: value for name, value in saved.items() if not _is_of(name, names)}
    for name in names:
        create(state, name, parameter, kind)
        given = saved.get(name, saved.get(name + CODES))
        assert given is not None
        if given.shape != parameter.shape:
            raise ValueError(f"the saved state {name} is {list(given.shape)}, the parameter {list(parameter.shape)}")
        for first in range(0, len(parameter), ROWS):
            rows = slice(first, first + ROWS)
            values = read(kept(saved, name), rows, wide_dtype(parameter)).to(parameter.device)
            write(kept(state, name), rows, values, None)
            if name in state and state[name].dtype == values.dtype:
                state[name][rows] = values
    return state


def expand_states(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Turn states in 8 bits into float32: a hook for ``register_load_state_dict_pre_hook`` of a plain optimizer.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer = torch.optim.AdamW([parameter])
        >>> handle = optimizer.register_load_state_dict_pre_hook(expand_states)
    """
    state = {place: _expanded(one) if isinstance(one, dict) else one for place, one in saved["state"].items()}
    return {**saved, "state": state}


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The precision that steps are taken in: the parameter's, at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _expanded(state: dict[str, Any]) -> dict[str, Any]:
    names = tuple(key.removesuffix(CODES) for key in state if key.endswith(CODES))
    if not names:
        return state
    codes = state[names[0] + CODES]
    return converted(state, names, torch.empty(codes.shape, dtype=torch.float32, device=codes.device), "float32")


def _is_of(key: str, names: tuple[str, ...]) -> bool:
    return key.removesuffix(CODES).removesuffix(SCALES) in names
