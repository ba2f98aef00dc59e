"""Operators with kernels. Each operator has a folder with its definition, its backends and its gradient.

``import topk_registry.ops`` registers the operators with torch.library. After this import, torch can load exported
programs and compiled packages that contain these operators.
"""

from topk_registry.ops import losses as _losses

__all__: list[str] = []
del _losses
