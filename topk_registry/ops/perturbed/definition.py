"""The perturbed k-th largest score in PyTorch operations."""

import torch
from torch import Generator, Tensor


def kth(
    scores: Tensor, k: int, epsilon: float, num_samples: int, generator: Generator | None, noise: Tensor | None
) -> Tensor:
    """Return the k-th largest entry of scores [B, n] + epsilon * noise, averaged over the draws: [B].

    If ``noise`` [num_samples, B, n] is None, the noise is random. For each draw, only the class of the k-th largest
    entry and the noise of this class are stored, so the memory hardly grows with the number of draws.
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
        # topk is slow for large k, so take the n + 1 - k smallest scores if these are fewer
        _, order = x.topk(k) if 2 * k <= n + 1 else x.topk(n + 1 - k, largest=False)
        indices.append(order[:, -1:])
        shifts.append(z.gather(1, indices[-1]))
    value = (scores.gather(1, torch.cat(indices, 1)) + epsilon * torch.cat(shifts, 1)).mean(1)
    # topk treats NaN as the largest number; amax finds NaN, and the product makes the result and the gradient NaN
    return value * torch.where(s.amax(1).isnan(), torch.nan, 1.0).to(value)
