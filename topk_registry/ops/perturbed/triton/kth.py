"""The perturbed k-th largest on GPUs, in Triton: noise is made where it is used, by Philox, and never stored.

One program a row and draw. Its noise is a function of the seed, the row's place, the draw and the class: counters 0, 1,
2, ... of the generator, four normal numbers each. The k-th largest is found one maximum at a time, counted from the
nearer end. Nothing waits for the device.
"""
# launches take options that kernels do not name, and the language of kernels is not Python's
# pyright: reportCallIssue=false, reportOperatorIssue=false

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4028234663852886e38)


def perturbed_kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Mean k-th largest of the perturbed scores, and which class it was in each draw: [rows, n], [] -> [rows], [rows,
    num_samples]. The seed is int64, on the device of the scores."""
    rows, n = scores.shape
    scores = scores.contiguous()
    value = scores.new_empty(rows, num_samples)
    index = torch.empty_like(value, dtype=torch.int64)
    if rows:
        N = 4 * triton.next_power_of_2(-(-n // 4))
        rank = min(k, n + 1 - k)
        with torch.cuda.device(scores.device) if scores.is_cuda else nullcontext():
            kth_of_draw[(rows, num_samples)](
                scores, seed, value, index, n, rank, 1.0 if rank == k else -1.0, epsilon,
                N=N, num_warps=max(1, N // 1024), enable_fp_fusion=True,
            )  # fmt: skip
    return value.mean(1), index


@triton.jit
def kth_of_draw(scores_ptr, seed_ptr, value_ptr, index_ptr, n, rank, sign, epsilon, N: tl.constexpr):
    """The score of the given rank in sign * (scores + epsilon * noise), and its class; a value of NaN for a NaN."""
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1)
    out = row * tl.num_programs(1) + draw
    counter = out * (N // 4) + tl.arange(0, N // 4)
    z0, z1, z2, z3 = tl.randn4x(tl.load(seed_ptr), counter)
    z = tl.reshape(tl.join(tl.join(z0, z1), tl.join(z2, z3)), (N,))  # in any order, as long as it is the same
    col = tl.arange(0, N)
    s = tl.load(scores_ptr + row * n + col, mask=col < n, other=0.0)
    broken = tl.max((s != s).to(tl.int32), 0) > 0
    # -inf stands for what is taken: classes of that score are kept above it
    x = tl.maximum(tl.where(s == s, sign * (s + epsilon * z), LOWEST), LOWEST)
    x = tl.where(col < n, x, float("-inf"))
    v, i = tl.max(x, 0, return_indices=True)
    for _ in range(1, rank):
        x = tl.where(col == i, float("-inf"), x)
        v, i = tl.max(x, 0, return_indices=True)
    v = sign * tl.where(v > LOWEST, v, float("-inf"))
    tl.store(value_ptr + out, tl.where(broken, float("nan"), v))
    tl.store(index_ptr + out, i.to(tl.int64))
