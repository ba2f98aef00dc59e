"""The backends of the k-subset operator, and where each serves."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from topk_registry.ops.backend import Backend, Operator, trial_in
from topk_registry.ops.cpu.entries import reject
from topk_registry.ops.cpu.library import is_prebuilt

# from which k on the CPU's kernels take rows one at a time, see "Large k" in README.md and docs/speed.md: of targets on
# many classes, of labels, and margins of all classes; those for small k are compiled without the code for large ones,
# and conversely
LARGE_K, LARGE_K_OF_LABEL, LARGE_K_OF_MARGINS = 6, 32, 48
MOST_K = 1024  # polynomials begin at e^(-k / 2) and reach e^(k / 2), which double precision holds


@dataclass(frozen=True)
class Kernels:
    """The functions of a backend, on rows s [B, n] with 2k <= n in single or double precision.

    A backend with ``takes_half`` gets half precision too. One with ``expected_hinges`` computes hinges of targets by a
    kernel of its own, see soft_targets.py.
    """

    label_margins: Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
    """(s, label [B], k, theta) -> (margin [B], gradient [B, n])"""
    margins: Callable[[Tensor, int, float], Tensor]
    """(s, k, theta) -> [B, n]"""
    margins_backward: Callable[[Tensor, Tensor, int, float], Tensor]
    """(g [B, n], s, k, theta) -> [B, n]"""
    expected_hinges: Callable[..., tuple[Tensor, Tensor]] | None = None


# a request is (k after the complement, double precision or not)
OPERATOR: Operator[Kernels] = Operator(
    "ksubset",
    {
        "numba": Backend(
            "numba",
            "topk_registry.ops.ksubset.numba.backend",
            "numba",
            lambda device, k, double: device.type == "cpu" and k <= MOST_K,
            f"the CPU and k or n - k up to {MOST_K}",
            checks_labels=True,
            is_prebuilt=is_prebuilt,
            reject=reject,
        ),
        "triton": Backend(
            "triton",
            "topk_registry.ops.ksubset.triton.backend",
            "triton",
            lambda device, k, double: device.type == "cuda" and not double and k <= 64,
            "GPUs of compute capability 8.0 and up, half or single precision, and k or n - k up to 64",
            takes_half=True,
            takes_strides=True,
            checks_labels=True,
        ),
        "torch": Backend(
            "torch", "topk_registry.ops.ksubset.torch.backend", None, lambda device, k, double: True, "everything"
        ),
    },
    trial_in("topk_registry.ops.ksubset.trial"),
    example=(5, False),
    tried=lambda k, double: (k >= LARGE_K_OF_LABEL, double),
)
