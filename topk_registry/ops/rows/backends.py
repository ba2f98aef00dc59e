"""The backends of the row losses, and where each serves: torch operations are a loss's own definition."""

from torch import Tensor

from topk_registry.ops.backend import Backend, Operator
from topk_registry.ops.cpu.entries import reject
from topk_registry.ops.cpu.library import is_prebuilt

Own = tuple[Tensor | None, ...]  # the tensors of a loss, which its owner may move or change between two calls


# a request says whether all is computed in double precision; the kernels of a backend are of a class, each loss's own
OPERATOR: Operator[type] = Operator(
    "rows",
    {
        "numba": Backend(
            "numba",
            "topk_registry.ops.rows.numba.backend",
            "numba",
            lambda device, double: device.type == "cpu",
            "scores on the CPU",
            is_prebuilt=is_prebuilt,
            reject=reject,
        ),
        "triton": Backend(
            "triton",
            "topk_registry.ops.rows.triton.driver",
            "triton",
            lambda device, double: device.type == "cuda" and not double,
            "GPUs of compute capability 8.0 and up, half or single precision",
        ),
        "torch": Backend("torch", __name__, None, lambda device, double: True, "everything"),
    },
    lambda kernels, device: True,
    example=(False,),
)
