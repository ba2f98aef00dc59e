"""The k-subset operator on GPUs, in Triton: the algorithm of torch_path in one kernel, or in a few passes.

One label a row, k up to 10 and rows up to 16,384 scores (32,768 in half precision): one kernel, which holds the row in
registers, reads the logits once and writes the gradient once. Above that, and for the margins of all classes, passes
over segments of the rows, which read the logits twice, with a small kernel between them that works on a few numbers a
row. The split is by compile time and registers: all that depends on the top group alone is unrolled in the one kernel,
k (2k+1) steps in every thread, and held in registers beside the row.

Half-precision scores are read as they are and computed with in single precision. A row's results depend on nothing but
that row. Rows with a NaN, with fewer than k + 1 finite scores, or with a label that is no class, come out as NaN.
Nothing waits for the device.
"""

from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor

LARGEST_K = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability: half-precision types and what Triton itself supports
FUSED_LARGEST_K = 10
SEGMENT = 16384  # scores that one program selects the largest from
TILE = 4096  # scores that one program writes


def supports(s: Tensor, k: int) -> bool:
    """Whether these kernels do what is asked for; the torch path does in any case."""
    if not s.is_cuda or s.dtype not in DTYPES or k > LARGEST_K or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(s.device) >= OLDEST


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> tuple[Tensor, Tensor]:
    """The margin theta l_y [B] of each row's label, in double precision, and its gradient: [B, n], [B] -> [B], [B, n].

    The gradient has the dtype of the scores.
    """
    margin = s.new_empty(s.shape[0], dtype=torch.float64)
    gradient = torch.empty_like(s)
    if not s.numel():
        return margin, gradient
    with _device(s):
        if k <= FUSED_LARGEST_K and s.shape[1] <= (SEGMENT if s.dtype == torch.float32 else 2 * SEGMENT):
            _fused_label(s, label, k, theta, margin, gradient)
        else:
            _label_in_passes(s, label, k, theta, margin, gradient)
    return margin, gradient


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l of every class, in single precision: [B, n] -> [B, n]."""
    out = torch.empty_like(s, dtype=torch.float32)
    if not s.numel():
        return out
    from topk_registry.ops.ksubset import triton_margins as kernels

    with _device(s):
        (B, n), inverse, sizes = s.shape, 1 / theta, _sizes(k, k + 1)
        top, where, sums = _summaries(s, None, k, theta, sizes["T"])
        state, in_top = s.new_empty(B, k + 4, dtype=torch.float32), torch.empty_like(top)
        kernels.solve_margins[(B,)](
            top, where, sums, s, state, in_top, in_top, n, theta, inverse, k, **sizes, MARKS=False, **_solving(sizes)
        )
        grid, options = _tiles(B, n)
        kernels.finish_margins[grid](s, top, where, state, in_top, out, n, theta, inverse, k, **sizes, **options)
    return out


def margins_backward(g: Tensor, s: Tensor, k: int, theta: float) -> Tensor:
    """The product of g with the derivatives of :func:`margins`: [B, n], [B, n] -> [B, n] in the dtype of the scores."""
    out = torch.empty_like(s)
    if not s.numel():
        return out
    from topk_registry.ops.ksubset import triton_margins as kernels

    with _device(s):
        (B, n), inverse, sizes = s.shape, 1 / theta, _sizes(k, k + 1)
        top, where, sums = _summaries(s, None, k, theta, sizes["T"])
        state, in_top = s.new_empty(B, k + 4, dtype=torch.float32), torch.empty_like(top)
        marks, H = top.new_empty(B, 2, sizes["T"]), top.new_empty(B, 2, k)
        kernels.solve_margins[(B,)](
            top, where, sums, g, state, in_top, marks, n, theta, inverse, k, **sizes, MARKS=True, **_solving(sizes)
        )
        grid, options = _tiles(B, n)
        W = top.new_empty(B, grid[1], k)
        kernels.sum_marks[grid](s, g, top, where, state, W, n, inverse, k, sizes["T"], **options)
        kernels.solve_marks[(B,)](
            top, where, sums, W.sum(1), marks, g, state, H, in_top, n, inverse, k, **sizes, **_solving(sizes)
        )
        kernels.finish_marks[grid](s, g, top, where, state, H, in_top, out, n, inverse, k, **sizes, **options)
    return out


def _fused_label(s: Tensor, label: Tensor, k: int, theta: float, margin: Tensor, gradient: Tensor) -> None:
    from topk_registry.ops.ksubset import triton_label as kernels

    B, n = s.shape
    N = _power_of_two(n)
    high = torch.tensor(theta, dtype=torch.float32).item()
    kernels.label_rows[(B,)](
        s, label, margin, gradient, n, high, theta - high, 1 / theta, k, **_sizes(k, k), N=N, **_options(N // 1024)
    )


def _label_in_passes(s: Tensor, label: Tensor, k: int, theta: float, margin: Tensor, gradient: Tensor) -> None:
    from topk_registry.ops.ksubset import triton_passes as kernels

    (B, n), inverse, sizes = s.shape, 1 / theta, _sizes(k, k)
    high = torch.tensor(theta, dtype=torch.float32).item()
    top, where, sums = _summaries(s, label, k, theta, sizes["T"])
    state, in_top = top.new_empty(B, k + 2), torch.empty_like(top)
    kernels.solve_label[(B,)](
        s, label, top, sums, margin, state, in_top, n, high, theta - high, inverse, k, **sizes, **_solving(sizes)
    )
    grid, options = _tiles(B, n)
    kernels.finish_label[grid](s, label, top, where, state, in_top, gradient, n, inverse, k, **sizes, **options)


def _summaries(s: Tensor, label: Tensor | None, k: int, theta: float, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the T largest scores, their classes, and the power sums of the rest: [B, T], [B, T], [B, k].

    Without the label, where there is one. The odds are relative to the T-th largest score.
    """
    from topk_registry.ops.ksubset import triton_passes as kernels

    B, n = s.shape
    N = min(SEGMENT, _power_of_two(n))
    segments = -(-n // N)
    top = s.new_empty(B, segments, T, dtype=torch.float32)
    where = s.new_empty(B, segments, T, dtype=torch.int32)
    sums = top.new_empty(B, segments, k)
    kernels.summarise[(B, segments)](
        s, s if label is None else label, top, where, sums, n, 1 / theta, k, T, N, label is not None, **_options(N // 1024)
    )
    return _merge(top, where, sums, theta) if segments > 1 else (top[:, 0], where[:, 0], sums[:, 0])


def _merge(top: Tensor, where: Tensor, sums: Tensor, theta: float) -> tuple[Tensor, Tensor, Tensor]:
    """One summary [B, .] of a row from those of its segments [B, segments, .]: what falls out joins the power sums."""
    T, k = top.shape[2], sums.shape[2]
    values, order = top.flatten(1).sort(1, descending=True, stable=True)  # ties stay in the order of classes
    r = values[:, T - 1 : T]
    j = torch.arange(1, k + 1, device=top.device)
    fallen = torch.where(values[:, T:] > -torch.inf, ((values[:, T:] - r) / theta).exp(), 0.0)
    lowered = torch.where(top[:, :, -1] > -torch.inf, ((top[:, :, -1] - r) / theta).exp(), 0.0)
    merged = (sums * lowered[..., None] ** j).sum(1)
    power = fallen
    for i in range(k):
        merged[:, i] += power.sum(1)
        power = power * fallen
    return values[:, :T].contiguous(), where.flatten(1).gather(1, order[:, :T]), merged


def _sizes(k: int, depth: int) -> dict[str, int]:
    """Of the top group, and of the vector of its lanes, which has one to spare."""
    T = 2 * depth + 1
    return {"T": T, "TP": _power_of_two(T + 1)}


def _tiles(B: int, n: int) -> tuple[tuple[int, int], dict[str, int | bool]]:
    N = min(TILE, _power_of_two(n))
    return (B, -(-n // N)), {"N": N, **_options(N // 1024)}


def _solving(sizes: dict[str, int]) -> dict[str, int | bool]:
    return _options(sizes["TP"] // 32)  # a lane a thread


def _options(warps: int) -> dict[str, int | bool]:
    return {"num_warps": min(16, max(1, warps)), "enable_fp_fusion": True}


def _power_of_two(n: int) -> int:
    return 1 << max(1, n - 1).bit_length()


def _device(s: Tensor):
    return torch.cuda.device(s.device) if s.is_cuda else nullcontext()
