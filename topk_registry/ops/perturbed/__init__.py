"""The perturbed top-k operator: the k-th largest score, smoothed by Gaussian noise. See README.md."""

from topk_registry.ops.perturbed.api import perturbed_hinge, perturbed_topk

__all__ = ["perturbed_hinge", "perturbed_topk"]
