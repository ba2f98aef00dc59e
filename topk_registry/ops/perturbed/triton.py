"""The perturbed k-th largest score on a GPU.

One program handles one row in one draw. The program generates the noise in registers, so the noise is never stored. The
noise of a class depends only on the seed, the row index, the draw and the class. The generator is Philox: one counter
value gives four normal numbers, for four neighboring classes. To find the k-th largest score, a program takes the
maximum k times, and removes each maximum before the next. No function waits for the GPU.
"""
# Triton kernels are not typed Python
# pyright: reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from topk_registry.ops.backend import laid_out
from topk_registry.ops.gpu.layout import compiled_for, launch

LOWEST = tl.constexpr(-3.4028234663852886e38)


def kth(scores: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return the k-th largest entry of scores + epsilon * noise, averaged over the draws: [B].

    Also return the class of the k-th largest entry in each draw: [B, num_samples].
    """
    B, n = scores.shape
    s = laid_out(scores.detach(), torch.float32)
    value = s.new_empty(B, num_samples)
    index = torch.empty_like(value, dtype=torch.int64)
    if B:
        N = 4 * triton.next_power_of_2(-(-n // 4))
        options = {"N": N, **compiled_for(N // 1024)}
        launch(kth_of_draw, (B, num_samples), s, seed, value, index, n, k, epsilon, **options)
    return value.mean(1), index


@triton.jit
def kth_of_draw(scores_ptr, seed_ptr, value_ptr, index_ptr, n, k, epsilon, N: tl.constexpr):
    """Store the k-th largest of scores + epsilon * noise, or NaN if a score of the row is NaN. Also store the class."""
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1)
    out = row * tl.num_programs(1) + draw
    counter = out * (N // 4) + tl.arange(0, N // 4)
    z0, z1, z2, z3 = tl.randn4x(tl.load(seed_ptr), counter)
    z = tl.reshape(tl.join(tl.join(z0, z1), tl.join(z2, z3)), (N,))  # any fixed order of classes will do
    col = tl.arange(0, N)
    s = tl.load(scores_ptr + row * n + col, mask=col < n, other=0.0)
    broken = tl.max((s != s).to(tl.int32), 0) > 0
    # -inf marks classes that were already taken, so a score of -inf is replaced by the lowest finite number
    x = tl.maximum(tl.where(s == s, s + epsilon * z, LOWEST), LOWEST)
    x = tl.where(col < n, x, float("-inf"))
    v, i = tl.max(x, 0, return_indices=True)
    for _ in range(1, k):
        x = tl.where(col == i, float("-inf"), x)
        v, i = tl.max(x, 0, return_indices=True)
    v = tl.where(v > LOWEST, v, float("-inf"))
    tl.store(value_ptr + out, tl.where(broken, float("nan"), v))
    tl.store(index_ptr + out, i.to(tl.int64))
