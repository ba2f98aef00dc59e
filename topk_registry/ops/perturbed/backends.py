"""The backends of the perturbed top-k operator, and where each serves."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from topk_registry.ops.backend import Backend, Operator, trial_in
from topk_registry.ops.cpu.entries import reject
from topk_registry.ops.cpu.library import is_prebuilt

EPSILONS = 1e-30, 1e30  # in single precision these can be divided by
GPU_LARGEST_N = 16384  # scores that fit into one program's registers beside their noise
GPU_LARGEST_RANK = 64  # counted from the nearer end: as many maxima are taken


@dataclass(frozen=True)
class Kernels:
    """The functions of a backend that makes its own noise."""

    perturbed_kth: Callable[[Tensor, Tensor, int, float, int], tuple[Tensor, Tensor]]
    """(scores [rows, n], seed int64 [], k, epsilon, draws) -> (value [rows], index [rows, draws])

    Scores are in single or double precision, the seed is on the device of the scores.
    """


def fits(rows: Tensor, k: int, epsilon: float, noise: Tensor | None) -> bool:
    """Return whether a kernel serves: noise is to be drawn, epsilon is in range, the row fits the device."""
    if noise is not None or not EPSILONS[0] <= epsilon <= EPSILONS[1]:
        return False
    n = rows.shape[1]
    small = n <= GPU_LARGEST_N and min(k, n + 1 - k) <= GPU_LARGEST_RANK and rows.dtype == torch.float32
    return rows.device.type != "cuda" or small


OPERATOR: Operator[Kernels] = Operator(
    "perturbed",
    {
        "numba": Backend(
            "numba",
            "topk_registry.ops.perturbed.numba.backend",
            "numba",
            lambda device: device.type == "cpu",
            "scores on the CPU",
            is_prebuilt=is_prebuilt,
            reject=reject,
        ),
        "triton": Backend(
            "triton",
            "topk_registry.ops.perturbed.triton.backend",
            "triton",
            lambda device: device.type == "cuda",
            "scores on GPUs of compute capability 8.0 and up",
        ),
        "torch": Backend(
            "torch", "topk_registry.ops.perturbed.torch.backend", None, lambda device: True, "scores everywhere"
        ),
    },
    trial_in("topk_registry.ops.perturbed.trial"),
)
