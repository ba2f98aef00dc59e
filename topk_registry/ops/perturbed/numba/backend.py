"""The perturbed k-th largest on the CPU. The kernel makes noise only where it can matter, see ../README.md."""

import torch
from torch import Tensor

from topk_registry.ops.cpu import entries
from topk_registry.ops.cpu.threads import run
from topk_registry.ops.perturbed.backends import Kernels
from topk_registry.ops.perturbed.numba.table import table
from topk_registry.ops.tensors import operand

LEAST_WORK = 1 << 15  # scores, counted in every draw, to a thread at least: about 20 microseconds of work
SCORES_AT_ONCE = 1 << 14  # scores that a thread takes at a time, at most


def perturbed_kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Mean k-th largest [rows] of scores [rows, n] over the draws, and which class it was in each [rows, draws].

    The noise is a function of the seed (int64 []), the row's place, the draw and the class.
    """
    B, n = scores.shape
    if 2 * k > n + 1:  # counted from the nearer end
        value, index = perturbed_kth(-scores, seed, n + 1 - k, epsilon, num_samples)
        return -value, index
    s = operand(scores, scores.shape, scores.dtype, scores.device)
    value, index = s.new_empty(B), s.new_empty(B, num_samples, dtype=torch.int64)
    threads = max(1, min(torch.get_num_threads(), B, B * n * num_samples // LEAST_WORK))
    step = max(1, min(SCORES_AT_ONCE // n, -(-B // threads)))
    sizes = B, n, k, num_samples, step, int(seed)
    body = entries.body("perturbed.numba.kth:draws_of_rows", s.dtype)
    run(body, *sizes, float(epsilon), s, table(), value, index, threads=threads)
    return value, index


kernels = Kernels(perturbed_kth)
