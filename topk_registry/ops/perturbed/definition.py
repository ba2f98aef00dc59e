"""The definition, which every implementation is compared with: plain autograd, all draws materialised."""

from torch import Tensor


def perturbed_topk_definition(scores: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor:
    """Mean over the draws of the k-th largest of s + eps Z_b: scores [..., n], noise [draws, ..., n] -> [...]."""
    perturbed = scores + epsilon * noise  # [draws, ..., n]
    return perturbed.sort(-1, descending=True).values[..., k - 1].mean(0)
