"""The perturbed top-k operator: the expected k-th largest of logits plus Gaussian noise. See README.md."""

from topk_registry.ops.perturbed.api import perturbed_topk

__all__ = ["perturbed_topk"]
