"""STAND-IN: replaced by the real head on rebase."""

from typing import NamedTuple

from torch import Tensor, nn

from topk_registry.ops.ksubset.static import static_marginals


class TopKOutput(NamedTuple):
    logits: Tensor
    marginals: Tensor
    indices: Tensor


class TopKHead(nn.Module):
    def __init__(self, k, *, temperature=1.0):
        super().__init__()
        self.k, self.temperature = k, temperature

    def forward(self, logits):
        return TopKOutput(logits, static_marginals(logits, self.k, self.temperature), logits.topk(self.k).indices)
