"""Launch the kernels of the smooth top-k hinge on a GPU: labels in label.py, other masses in masses.py.

Half-precision scores are loaded unchanged and converted to single precision. The result of a row depends only on the
row and its address, because the order of sums depends on the alignment. Rows with NaN or with a label out of range give
NaN. No function synchronizes with the device.
"""

from collections.abc import Mapping
from functools import lru_cache
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.gpu.layout import in_rows, like_rows, power_of_two, tiles
from topk_registry.ops.hinge import invertible
from topk_registry.ops.ksubset.triton.label import label_rows
from topk_registry.ops.ksubset.triton.masses import mass_rows
from topk_registry.ops.tensors import laid_out, launch

MAX_K = 10  # coefficients and powers are unrolled; a larger k needs too many registers and minutes to compile
MAX_LABELS = 8  # labels per row, unrolled; more labels are stored as the masses of all classes [B, n]


def losses(
    logits: Tensor, masses: Any, k: int, tau: float, alpha: Tensor, needs_grad: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return sum_c q_c tau softplus((alpha_c - margin_c / k) / tau) [B] in single precision, and its gradient [B, n].

    Args:
        logits: scores [B, n] in single or half precision, 2 k <= n, k up to 10.
        masses: an object with ``labels``, ``shares``, ``even`` and ``dense``, see ``smooth_topk``.
        k: size of the set.
        tau: smoothing temperature.
        alpha: required margin, [] on any device or [n].
        needs_grad: whether the gradient is returned. The gradient has the dtype of the logits. For float16 logits
            it is in single precision, because the factor of a mean may underflow before a loss scaler multiplies it.
    """
    B, n = logits.shape
    memory, stride = in_rows(logits)
    out, gradient = like_rows(
        logits.shape, stride, torch.float32 if logits.dtype == torch.float16 else logits.dtype, logits.device
    )
    value = torch.empty(B, dtype=torch.float32, device=logits.device)
    if B:
        gap, where = _gap(alpha, n, logits.device)
        labels, shares, even, dense = masses.labels, masses.shares, masses.even, masses.dense
        if dense is None and labels.shape[1] > MAX_LABELS:
            dense = shares.new_zeros(B, n) if even is None else even.to(shares)[:, None].expand(B, n)
            dense = dense.scatter_add(1, labels, shares).float()
        sizes = {"ALPHA": where, **tiles(n, stride, logits.element_size())}
        grid = (-(-B // sizes["R"]),)
        numbers = _numbers(k, tau)
        if dense is None and even is None and labels.shape[1] == 1:
            launch(
                label_rows, grid, memory, laid_out(labels, torch.int64), laid_out(shares, shares.dtype), gap, value,
                out, B, **numbers, TP=power_of_two(3 * k + 2), **sizes,
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
    return value, gradient if needs_grad else None


def _gap(alpha: Tensor, n: int, device: torch.device) -> tuple[Tensor | float, int]:
    """Return the required margin in the form of ``gap_of``. A number on the CPU is passed by value."""
    if alpha.ndim == 0 and alpha.is_cpu and device.type != "cpu":
        return float(alpha), 0
    if alpha.shape not in ((), (n,)):
        raise ValueError(f"alpha must be one number or one per class [{n}], got {list(alpha.shape)}")
    return laid_out(alpha.to(device), alpha.dtype), 1 + alpha.ndim


@lru_cache(maxsize=64)
def _numbers(k: int, tau: float) -> Mapping[str, int | float]:
    """Return k, tau and numbers derived from them, by the names of the kernels' parameters."""
    theta, low = _two_singles(invertible(k * tau, torch.float32))
    tau = invertible(tau, torch.float32)
    inverse_tau, inverse_tau_low = _two_singles(1 / tau)
    return {
        "depth": k, "k": k, "theta": theta, "theta_low": low, "inverse": 1 / (theta + low), "tau": tau,
        "inverse_tau": inverse_tau, "inverse_tau_low": inverse_tau_low,
    }  # fmt: skip


def _two_singles(x: float) -> tuple[float, float]:
    """Return a number as the sum of two numbers in single precision."""
    (high,) = unpack("f", pack("f", x))
    return high, x - high
