"""The operator on logits from a record of masses, until the operator takes the record itself."""

import torch
from torch import Tensor

from topk_registry.losses.targets import Masses
from topk_registry.ops.ksubset import smooth_topk_hinge


def smooth_topk(logits: Tensor, masses: Masses, *, k: int, tau: float, alpha: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return smooth_topk_hinge(logits, masses.table(logits.shape[1], dtype), k, tau=tau, alpha=alpha)
