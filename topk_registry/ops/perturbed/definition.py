"""Definition of the perturbed k-th largest score in PyTorch operations, with noise from any source."""

import torch
from torch import Generator, Tensor


def perturbed_topk_definition(scores: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor:
    """Return the mean over draws of the k-th largest of s + eps Z, for scores [..., n] and noise [draws, ..., n]."""
    perturbed = scores + epsilon * noise  # [draws, ..., n]
    return perturbed.sort(-1, descending=True).values[..., k - 1].mean(0)


def kth(
    scores: Tensor, k: int, epsilon: float, num_samples: int, generator: Generator | None, noise: Tensor | None
) -> Tensor:
    """Return the mean k-th largest score [B] of scores [B, n], differentiable.

    Each draw stores only its k-th class and the noise of this class, so memory hardly grows with the number of draws.
    """
    s, n, indices, shifts = scores.detach(), scores.shape[1], [], []
    for draw in range(num_samples if epsilon else 1):
        if not epsilon:
            z = torch.zeros_like(s)
        elif noise is not None:
            z = noise[draw]
        elif generator is None:  # may be traced with any number of rows
            z = torch.randn_like(s)
        else:
            z = torch.randn(s.shape, generator=generator, dtype=s.dtype, device=s.device)
        x = s + epsilon * z
        # counted from the nearer end: topk is slow for large k
        _, order = x.topk(k) if 2 * k <= n + 1 else x.topk(n + 1 - k, largest=False)
        indices.append(order[:, -1:])
        shifts.append(z.gather(1, indices[-1]))
    value = (scores.gather(1, torch.cat(indices, 1)) + epsilon * torch.cat(shifts, 1)).mean(1)
    # topk ranks NaN as a number; amax propagates it, and the product passes it to the gradient
    return value * torch.where(s.amax(1).isnan(), torch.nan, 1.0).to(value)
