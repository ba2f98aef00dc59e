"""The step by torch's own optimizers, between states that are made wide and rounded again."""

import torch
from torch import Tensor

from topk_registry.ops.update.backends import Kernels, State, Update
from topk_registry.ops.update.definition import RandomBits, from_8_bits, to_8_bits, to_bfloat16

IN_CACHE = 1 << 17  # numbers that a CPU works on at a time where they are converted


def step(rows: Tensor, gradient: Tensor, states: list[State], update: Update, first: int) -> None:
    """Change rows and states in place; which random bits a number gets depends on the numbers before it."""
    if not rows.numel():
        return
    wide = torch.promote_types(rows.dtype, torch.float32)
    converted = rows.dtype != wide or any(state.values.dtype != wide for state in states)
    size = max(1, IN_CACHE // rows[0].numel()) if converted and not rows.is_cuda else len(rows)
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        stored = rows[part]
        stepped, kept = stored.to(wide), [read(state, part, wide) for state in states]
        update.rule.step(stepped, gradient[part], kept, update.group, update.count)
        for state, values in zip(states, kept, strict=True):
            write(state, part, values, update.bits)
        if stored.dtype == torch.bfloat16:
            stored.copy_(to_bfloat16(stepped, update.bits.like(stepped)))
        elif stored.dtype != wide:
            stored.copy_(stepped)


def read(state: State, rows: slice, dtype: torch.dtype) -> Tensor:
    """A state of some rows in the precision of the step: the state itself where it has that, else a copy."""
    if state.scales is None:
        return state.values[rows].to(dtype)
    return from_8_bits(state.values[rows], state.scales[rows], signed=state.signed).to(dtype)


def write(state: State, rows: slice, values: Tensor, bits: RandomBits | None) -> None:
    """Round a state of some rows to the precision that it is kept in; without ``bits`` to the nearest number."""
    if state.scales is not None:
        x = values.float()
        codes, scales = to_8_bits(x, None if bits is None else bits.like(x), signed=state.signed)
        state.values[rows], state.scales[rows] = codes, scales
    elif state.values.dtype != values.dtype:
        state.values[rows] = values if bits is None else to_bfloat16(values.float(), bits.like(values))


kernels = Kernels(step)
