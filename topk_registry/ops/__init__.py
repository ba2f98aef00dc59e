"""Operators: one folder each, with its definition, its backends and its autograd.

``import topk_registry.ops`` registers them with torch.library. A saved program that holds them, from ``torch.export``
or as a compiled package, can be loaded from then on.
"""

from topk_registry.ops.ksubset import custom_op as _ksubset
from topk_registry.ops.perturbed import custom_op as _perturbed

__all__: list[str] = []
del _ksubset, _perturbed
