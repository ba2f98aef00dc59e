"""The perturbed k-th largest on the CPU. The kernel makes noise only where it can matter, see ../README.md."""
# pyright: reportCallIssue=false, reportArgumentType=false
# numba's intrinsics are called without their first parameter

from functools import lru_cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from topk_registry.ops.cpu import openmp as team
from topk_registry.ops.perturbed.backends import Kernels
from topk_registry.ops.perturbed.numba import kth, noise
from topk_registry.ops.tensors import operand

ALONE = 1 << 15  # scores, counted in every draw, to a thread at least: about 20 microseconds of work
STEP = 1 << 14  # scores that a thread takes at a time, at most


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
    threads = max(1, min(torch.get_num_threads(), B, B * n * num_samples // ALONE))
    step = max(1, min(STEP // n, -(-B // threads)))
    sizes = B, n, k, num_samples, step, int(seed)
    team.run(_body(s.dtype), *sizes, float(epsilon), s, noise.table(), value, index, threads=threads)
    return value, index


@lru_cache(maxsize=2)
def _body(dtype: torch.dtype) -> team.Body:
    real, edition = np.float64 if dtype == torch.float64 else np.float32, team.edition()
    shape = tuple(noise.table().shape)

    @team.compiled
    def body(job):
        assert edition  # part of the cache's key: numba does not see that other files have changed
        _, B, n, k, draws, step, _ = carray(job, 7, np.int64)
        epsilon, address = carray(job, 8, np.float64)[7], carray(job, 12, np.int64)[8:]
        s, table = carray(team.pointer(address[0]), (B, n), real), carray(team.pointer(address[1]), shape, np.float64)
        value, index = carray(team.pointer(address[2]), B, real), carray(team.pointer(address[3]), (B, draws), np.int64)
        key = carray(job, 14, np.uint32)[12:]
        kth.rows(job, step, s, k, epsilon, key, table, value, index)

    return body


kernels = Kernels(perturbed_kth)
