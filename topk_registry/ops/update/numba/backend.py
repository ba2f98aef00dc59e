"""The step on the CPU in one pass over the rows: states are read, stepped and rounded again, a row at a time."""

import torch
from torch import Tensor

from topk_registry.ops.cpu import entries
from topk_registry.ops.cpu.threads import run
from topk_registry.ops.tensors import operand
from topk_registry.ops.update.backends import Kernels, State, Update

LEAST_WORK = 1 << 15  # numbers to a thread at least: about 20 microseconds of work
NUMBERS_AT_ONCE = 1 << 14  # that a thread takes at a time, about
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # how states are stored, as in rows.py
WORD = (1 << 32) - 1


def step(rows: Tensor, gradient: Tensor, states: list[State], update: Update, first: int) -> None:
    """Change rows and states in place; the random bits of a number are those of its place, see README.md."""
    m, d = rows.shape
    g = operand(gradient, rows.shape, torch.float32, rows.device)
    numbers, bits = update.rule.numbers(update.group, update.count), update.bits
    threads = max(1, min(torch.get_num_threads(), m, m * d // LEAST_WORK))
    at_once = max(1, min(NUMBERS_AT_ONCE // max(d, 1), -(-m // threads)))
    kind = KINDS[states[0].values.dtype] if states else 0
    settings = numbers.is_adam, numbers.nesterov, len(states), kind
    stream = first, bits.update & WORD, bits.rank, bits.seed & WORD, bits.seed >> 32 & WORD
    memory = [t for state in states for t in (state.values, state.scales)] + [None] * (4 - 2 * len(states))
    reals = (numbers.size, numbers.keep, numbers.decay, numbers.first, numbers.rest)
    moments = (numbers.second, numbers.second_rest, numbers.root, numbers.eps)
    body = entries.body("update.numba.rows:steps_of_rows", rows.dtype)
    run(body, m, d, at_once, *map(int, settings), *stream, *reals, *moments, rows, g, *memory, threads=threads)


kernels = Kernels(step)
