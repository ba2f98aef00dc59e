"""Launch the GPU kernels of the smooth top-k loss: label.py for one label per row, masses.py for all other targets.

The kernels read scores in single or half precision, and compute mostly in single precision. The order of sums depends
on the alignment of the row in memory. Therefore, the result of a row depends on the row and on its address in memory,
but not on other rows. If a row contains NaN, the loss and the gradient of the row are NaN. If no class has a weight in
the target of the row, both are 0 instead. A label with a weight must be a class from 0 to n - 1. Otherwise, the loss
and the gradient of the row are NaN, or, for more than MAX_LABELS labels per row, a device-side assert fails, as in
torch's cross-entropy. No function waits for the GPU.
"""

from collections.abc import Mapping
from functools import lru_cache
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.backend import laid_out
from topk_registry.ops.gpu.layout import in_rows, launch, like_rows, power_of_two, tiles
from topk_registry.ops.ksubset.graph import invertible
from topk_registry.ops.ksubset.triton.label import label_rows
from topk_registry.ops.ksubset.triton.masses import mass_rows
from topk_registry.ops.masses import Masses

MAX_K = 10  # loops over k are unrolled; a kernel for larger k needs too many registers, and minutes to compile
MAX_CACHED = 4  # label_rows keeps a row with at most this many tiles in registers
MAX_LABELS = 8  # loops over the labels of a row are unrolled; more labels are converted to masses of all classes [B, n]


def losses(
    logits: Tensor, masses: Masses, k: int, tau: float, alpha: Tensor, needs_grad: bool = True, sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the smooth top-k loss of each row [B] in single precision, and the gradient [B, n].

    The loss of a row is sum_c q_c tau softplus((alpha_c - m_c / k) / tau). The mass q_c is the weight of class c in the
    target of the row. The margin m_c is the score of class c minus the k-th largest score of the other classes,
    smoothed with temperature k tau.

    Args:
        logits: scores [B, n] in single or half precision, with 2k <= n.
        masses: the mass q_c of each class c in each row.
        k: as in "k-th largest score", at most MAX_K.
        tau: smoothing temperature of the loss.
        alpha: required margin, as one number [] on any device or as one number per class [n].
        needs_grad: if False, the second result is None.
        sums: if True, the first result is the sum of the losses [].

    Returns:
        The losses and the gradient. The gradient is in bfloat16 for bfloat16 logits, else in single precision. The
        gradient is never in float16, because a gradient that is divided by the batch size could underflow before a loss
        scaler multiplies it.
    """
    B, n = logits.shape
    memory, stride = in_rows(logits)
    out, gradient = like_rows(
        logits.shape, stride, torch.float32 if logits.dtype == torch.float16 else logits.dtype, logits.device
    )
    value = torch.empty(B, dtype=torch.float32, device=logits.device)
    if B:
        gap, where = _gap(alpha, n, logits.device)
        parts: tuple[Any, ...] = masses[:4]
        labels, shares, even, dense = parts
        if dense is None and labels.shape[1] > MAX_LABELS:
            dense = shares.new_zeros(B, n) if even is None else even.to(shares)[:, None].expand(B, n)
            dense = dense.scatter_add(1, labels, shares).float()
        sizes = {"ALPHA": where, **tiles(n, stride, logits.element_size())}
        grid = (-(-B // sizes["R"]),)
        numbers = _numbers(k, tau)
        if dense is None and even is None and labels.shape[1] == 1:
            launch(
                label_rows, grid, memory, laid_out(labels, torch.int64), laid_out(shares, shares.dtype), gap, value,
                out, B, **numbers, TP=power_of_two(3 * k + 2), CACHED=sizes["TILES"] <= MAX_CACHED, **sizes,
            )  # fmt: skip
        else:
            few, q, step = 0, value, n
            if dense is None:
                few, labels, shares = labels.shape[1], laid_out(labels, torch.int64), laid_out(shares, shares.dtype)
            else:
                q, step = in_rows(dense)
                labels = shares = even = None
            launch(
                mass_rows, grid, memory, q, *(value if one is None else one for one in (labels, shares, even)), gap,
                value, out, B, **numbers, M=few, EVEN=even is not None, SQ=step, TP=power_of_two(3 * k + 5), **sizes,
            )  # fmt: skip
    return value.sum() if sums else value, gradient if needs_grad else None


def _gap(alpha: Tensor, n: int, device: torch.device) -> tuple[Tensor | float, int]:
    # the required margin as the arguments ``alpha`` and ``ALPHA`` of gap_of
    if alpha.ndim == 0 and alpha.is_cpu and device.type != "cpu":  # a number on the CPU is passed by value
        return float(alpha), 0
    if alpha.shape not in ((), (n,)):
        raise ValueError(f"alpha must be one number or one per class [{n}], got {list(alpha.shape)}")
    return laid_out(alpha.to(device), alpha.dtype), 1 + alpha.ndim


@lru_cache(maxsize=64)
def _numbers(k: int, tau: float) -> Mapping[str, int | float]:
    theta, low = _two_singles(invertible(k * tau, torch.float32))
    tau = invertible(tau, torch.float32)
    inverse_tau, inverse_tau_low = _two_singles(1 / tau)
    return {
        "depth": k, "k": k, "theta": theta, "theta_low": low, "inverse": 1 / (theta + low), "tau": tau,
        "inverse_tau": inverse_tau, "inverse_tau_low": inverse_tau_low,
    }  # fmt: skip


def _two_singles(x: float) -> tuple[float, float]:
    (high,) = unpack("f", pack("f", x))
    return high, x - high  # their sum is x
