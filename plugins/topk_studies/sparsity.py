"""The share of entries of a gradient that are not zero."""

import torch
from torch import Tensor

from topk_registry.metrics import StreamingMetric
from topk_registry.metrics.streaming import ratio


class GradientSparsity(StreamingMetric):
    """The share of entries of the loss's gradient, with respect to the logits, that are not zero: ``nonzero``.

    Hinge losses on the k-th score move two logits a sample, cross-entropy all n; noise fills the hinge's gradient in.

    Example:
        >>> metric = GradientSparsity()
        >>> logits = torch.randn(8, 100, requires_grad=True)
        >>> topk_registry.create_loss("topk_hinge")(metric.watch(logits), torch.arange(8)).backward()
        >>> metric.compute()["nonzero"] <= 2 / 100
        True

    Reference: Garcin et al. 2022, Figure 2.
    """

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__(nonzero=zero, entries=zero.clone())

    def update(self, gradient: Tensor) -> None:
        """Count the entries of a gradient, of any shape."""
        self.follow(gradient)
        self.sums["nonzero"] += torch.count_nonzero(gradient)
        self.sums["entries"] += gradient.numel()

    def watch(self, logits: Tensor) -> Tensor:
        """Count the gradient of these logits when it comes; returns them."""
        logits.register_hook(lambda gradient: self.update(gradient.detach()))
        return logits

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"nonzero": ratio(totals["nonzero"], totals["entries"])}
