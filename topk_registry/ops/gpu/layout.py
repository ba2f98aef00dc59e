"""Memory layout of rows of scores, the size of a Triton program (a group of threads), and the launch of a kernel."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.backend import is_plain, laid_out

TILE_OF_A_WARP = 256  # scores per tile and warp: eight per thread
NUMBERS = frozenset((bool, int, float, type(None)))
BYTES_OF_A_WARP = 1 << 14  # bytes of a row per warp, if the row does not stay in registers


def in_rows(s: Tensor) -> tuple[Tensor, int]:
    """Return a tensor that begins at the first score of ``s`` [B, n], and the distance between rows, in scores.

    The scores are not copied if ``s`` is contiguous, or if ``s`` holds n neighboring columns of a tensor with at most
    2 n columns. Otherwise, the scores are copied to contiguous memory.
    """
    (B, n), (step, of_classes) = s.shape, s.stride()
    if s.is_contiguous() or of_classes != 1 or not n <= step <= 2 * n or s.is_neg():
        return laid_out(s, s.dtype), n
    return s.as_strided(((B - 1) * step + n,), (1,)), step


def like_rows(shape: torch.Size, stride: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return new memory [B, stride] for rows of ``shape`` [B, n], and a view [B, n] of the rows in this memory."""
    memory = torch.empty(shape[0], stride, dtype=dtype, device=device)
    return memory, memory if stride == shape[1] else memory[:, : shape[1]]


def tiles(n: int, stride: int, size: int) -> Mapping[str, int | bool]:
    """Return the compile-time constants of a kernel for rows of n numbers, for example R, the rows per program.

    ``tiles.py`` explains the constants. ``stride`` is the distance from one row to the next, in numbers. ``size`` is
    the size of a number in bytes.
    """
    return _tiles(n, stride, size, TILE_OF_A_WARP)


@cache
def _tiles(n: int, stride: int, size: int, of_a_warp: int) -> Mapping[str, int | bool]:
    vector, rows, length = 16 // size, 1, power_of_two(n)
    # Up to n = 4096, a warp keeps four tiles in registers. In longer rows, a warp gets more tiles, because each warp
    # has a fixed cost. With too few warps per row, however, the rows in work exceed the L2 cache.
    warps = max(1, length // 1024) if n <= 4096 else max(2, min(8, length * size // BYTES_OF_A_WARP))
    N = of_a_warp * warps
    if n <= N // 2:
        N = power_of_two(n)
        rows = 2 * of_a_warp // N
    if rows > 1 or (stride % vector and n <= N):
        vector = 1
    count = -(-(n + (stride % vector and vector - 1)) // N)
    layout = {"n": n, "S": stride, "R": rows, "N": N, "TILES": count}
    return layout | {"VECTOR": vector, "SHIFTED": stride % vector > 0, **compiled_for(warps)}


def compiled_for(warps: int) -> dict[str, int | bool]:
    """Return compile options: the number of warps, which is ``warps`` limited to [1, 16], and fused multiply-add on."""
    # The number of warps determines the order of sums, and so the last bit of the result. Therefore, the number of
    # warps may depend only on n, k and the dtype.
    return {"num_warps": min(16, max(1, warps)), "enable_fp_fusion": True}


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 2."""
    return 1 << max(1, n - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel with ``args`` on a grid of programs. ``args[0]`` is a tensor on the device of the kernel.

    Raise a TypeError if an argument is a tensor that is on another device or is not plain and contiguous.
    """
    device, seen = args[0].device, None
    for value in (*args, *options.values()):
        if type(value) in NUMBERS or value is seen or not isinstance(value, Tensor):
            continue
        seen = value  # an unused argument is often the previous argument
        _check_contiguous(value)
        if value.device != device:
            raise TypeError(f"a kernel on {device} got a tensor on {value.device}")
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[grid](*args, **options)


def _check_contiguous(t: Tensor) -> None:
    if not is_plain(t) or t.is_meta or t.is_neg() or not t.is_contiguous():
        raise TypeError(
            f"a kernel needs plain contiguous memory, got {type(t).__name__} "
            f"{list(t.shape)} with strides {t.stride()} on {t.device}"
        )
