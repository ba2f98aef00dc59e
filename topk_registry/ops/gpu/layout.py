"""How rows of scores lie in memory, and how kernels share them out."""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from topk_registry.ops.tensors import laid_out

TILE_OF_A_WARP = 256  # scores of a row that a warp works on together, eight a thread
HELD = 4  # tiles of a row that a kernel keeps in registers
BYTES_OF_A_WARP = 1 << 14  # of a row that is read again for each pass


def in_rows(s: Tensor) -> tuple[Tensor, int]:
    """The memory of rows [B, n] from the first score on, of any shape, and how far after a row the next one begins.

    Rows that are a part of longer ones, such as the logits of some of the classes, stay where they are. Any other view
    is copied.
    """
    (B, n), (step, of_classes) = s.shape, s.stride()
    if s.is_contiguous() or of_classes != 1 or not n <= step <= 2 * n or s.is_neg():
        return laid_out(s, s.dtype), n
    return s.as_strided(((B - 1) * step + n,), (1,)), step


def like_rows(shape: torch.Size, stride: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """New memory for rows with these strides, and the rows [B, n] in it."""
    memory = torch.empty(shape[0], stride, dtype=dtype, device=device)
    return memory, memory if stride == shape[1] else memory[:, : shape[1]]


def tiles(n: int, stride: int, size: int) -> Mapping[str, int | bool]:
    """How a kernel shares rows out: rows a program, tiles a row, numbers in a vector of 16 bytes; ``size`` in bytes."""
    return _tiles(n, stride, size, TILE_OF_A_WARP)


@cache
def _tiles(n: int, stride: int, size: int, of_a_warp: int) -> Mapping[str, int | bool]:
    vector, rows, length = 16 // size, 1, power_of_two(n)
    # four tiles a thread, in registers. Where that is too long, many: what a row costs besides is by the thread.
    # With few warps a row, though, more rows are in flight than the L2 cache holds
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
    """Compile options: the number of warps, and products that are added up unrounded."""
    # the number of warps follows from n, k and the precision: it decides the order of sums, and with it the last bit
    return {"num_warps": min(16, max(1, warps)), "enable_fp_fusion": True}


def power_of_two(n: int) -> int:
    """The least power of two that is at least n, and 2."""
    return 1 << max(1, n - 1).bit_length()
