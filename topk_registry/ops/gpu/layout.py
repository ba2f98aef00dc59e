"""Memory layout of rows of scores, and distribution of rows over kernel programs."""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from topk_registry.ops.tensors import laid_out

TILE_OF_A_WARP = 256  # scores of a row per warp, eight per thread
HELD = 4  # maximum number of tiles that a row has in registers
BYTES_OF_A_WARP = 1 << 14  # bytes per warp for a row that is read again in each pass


def in_rows(s: Tensor) -> tuple[Tensor, int]:
    """Return the memory of rows [B, n] from the first score on, in any shape, and the stride between rows.

    Rows that are slices of longer rows, such as the logits of some classes, are not copied. Any other view is copied.
    """
    (B, n), (step, of_classes) = s.shape, s.stride()
    if s.is_contiguous() or of_classes != 1 or not n <= step <= 2 * n or s.is_neg():
        return laid_out(s, s.dtype), n
    return s.as_strided(((B - 1) * step + n,), (1,)), step


def like_rows(shape: torch.Size, stride: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return new memory for rows with this stride, and the rows [B, n] as a view."""
    memory = torch.empty(shape[0], stride, dtype=dtype, device=device)
    return memory, memory if stride == shape[1] else memory[:, : shape[1]]


def tiles(n: int, stride: int, size: int) -> Mapping[str, int | bool]:
    """Return kernel constants: rows per program, tiles per row, numbers per 16-byte vector. ``size`` is in bytes."""
    return _tiles(n, stride, size, TILE_OF_A_WARP)


@cache
def _tiles(n: int, stride: int, size: int, of_a_warp: int) -> Mapping[str, int | bool]:
    vector, rows, length = 16 // size, 1, power_of_two(n)
    # Four tiles per thread in registers. A longer row needs many tiles per thread, because each thread has a fixed
    # cost. With few warps per row, however, the rows in flight exceed the L2 cache.
    warps = max(1, length // 1024) if n <= 4096 else max(2, min(8, length * size // BYTES_OF_A_WARP))
    N = of_a_warp * warps
    if n <= N // 2:
        N = power_of_two(n)
        rows = 2 * of_a_warp // N
    if rows > 1 or (stride % vector and n <= N):
        vector = 1
    count = -(-(n + (stride % vector and vector - 1)) // N)
    layout = {"n": n, "S": stride, "R": rows, "N": N, "TILES": count, "HELD": count <= HELD}
    return layout | {"VECTOR": vector, "SHIFTED": stride % vector > 0, **compiled_for(warps)}


def compiled_for(warps: int) -> dict[str, int | bool]:
    """Return compile options: the number of warps, and fused multiply-add."""
    # the number of warps must depend on n, k and precision only, because it determines the order of sums and the last
    # bit
    return {"num_warps": min(16, max(1, warps)), "enable_fp_fusion": True}


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 2."""
    return 1 << max(1, n - 1).bit_length()
