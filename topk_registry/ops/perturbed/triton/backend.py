"""The perturbed k-th largest on GPUs, in Triton: noise is made where it is used, by Philox, and never stored.

One program a row and draw. Its noise is a function of the seed, the row's place, the draw and the class: counters 0, 1,
2, ... of the generator, four normal numbers each. The k-th largest is found one maximum at a time, counted from the
nearer end. Nothing waits for the device.
"""

import torch
import triton
from torch import Tensor

from topk_registry.ops.gpu.layout import compiled_for
from topk_registry.ops.perturbed.backends import Kernels
from topk_registry.ops.perturbed.triton.kth import kth_of_draw
from topk_registry.ops.tensors import launch, operand


def perturbed_kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Mean k-th largest of the perturbed scores, and which class it was in each draw: [rows, n], [] -> [rows], [rows,
    num_samples]. The seed is int64, on the device of the scores."""
    rows, n = scores.shape
    scores, seed = (operand(t, t.shape, t.dtype, scores.device) for t in (scores, seed))
    value = scores.new_empty(rows, num_samples)
    index = torch.empty_like(value, dtype=torch.int64)
    if rows:
        N = 4 * triton.next_power_of_2(-(-n // 4))
        rank = min(k, n + 1 - k)
        launch(
            kth_of_draw, (rows, num_samples), scores, seed, value, index, n, rank, 1.0 if rank == k else -1.0, epsilon,
            N=N, **compiled_for(N // 1024),
        )  # fmt: skip
    return value.mean(1), index


kernels = Kernels(perturbed_kth)
