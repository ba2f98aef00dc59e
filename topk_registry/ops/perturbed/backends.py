"""Which implementations make their own noise, where each serves, and which one serves here; they load when used.

The module of one has ``perturbed_kth(scores [rows, n], seed int64 [], k, epsilon, num_samples) -> (value [rows], index
[rows, num_samples])`` for scores in single or double precision, the seed on the same device.
"""

from types import ModuleType

import torch
from torch import Tensor

from topk_registry.ops import optional

TABLE = {
    "numba": ("cpu", "numba.backend"),
    "triton": ("cuda", "triton.backend"),
}  # the package each needs: the type of device, the module
EPSILONS = 1e-30, 1e30  # in single precision these can be divided by
GPU_LARGEST_N = 16384  # scores that fit into one program's registers beside their noise
GPU_LARGEST_RANK = 64  # counted from the nearer end: as many maxima are taken


def choose(impl: str, device: torch.device) -> str | None:
    """The implementation to use: ``impl``, or for "auto" the first that serves and works; None for the torch path."""
    if impl in TABLE and TABLE[impl][0] != device.type:
        raise ValueError(f"impl {impl!r} is for scores on {TABLE[impl][0]}, these are on {device}")
    if impl != "auto":
        return impl if impl in TABLE else None
    return next((name for name, (there, _) in TABLE.items() if there == device.type and _works(name, device)), None)


def fits(rows: Tensor, k: int, epsilon: float, noise: Tensor | None) -> bool:
    """Whether there is noise to be made, of a size that can be, and the kernels of the device take such rows."""
    if noise is not None or not EPSILONS[0] <= epsilon <= EPSILONS[1]:
        return False
    n = rows.shape[1]
    small = n <= GPU_LARGEST_N and min(k, n + 1 - k) <= GPU_LARGEST_RANK and rows.dtype == torch.float32
    return rows.device.type != "cuda" or small


def load(name: str) -> ModuleType:
    return optional.load(_module(name))


def _works(name: str, device: torch.device) -> bool:
    return (
        (device.type != "cuda" or optional.recent_gpu(device))
        and optional.works(_module(name), name)
        and optional.runs(name, _trial, name, device)
    )


def _trial(name: str, device: torch.device) -> bool:
    """Whether the kernels do here what they should: find the second largest score, of noise too little to matter."""
    scores = torch.linspace(0, 30, 39, device=device).sin().view(3, 13)
    value, index = load(name).perturbed_kth(scores, torch.zeros((), dtype=torch.int64, device=device), 2, 1e-20, 2)
    wanted, where = (x[:, 1] for x in scores.topk(2))
    return torch.allclose(value, wanted) and bool((index == where[:, None]).all())


def _module(name: str) -> str:
    return f"{__package__}.{TABLE[name][1]}"
