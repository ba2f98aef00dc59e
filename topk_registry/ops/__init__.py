"""Operators with kernels. Each operator has a folder with its definition, its backends and its gradient.

``import topk_registry.ops`` registers the operators with torch.library. After this import, torch can load exported
programs and compiled packages that contain these operators.
"""

from topk_registry.ops.ksubset import custom_op as _ksubset
from topk_registry.ops.perturbed import custom_op as _perturbed

__all__: list[str] = []
del _ksubset, _perturbed
