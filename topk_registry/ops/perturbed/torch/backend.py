"""The torch path: draw after draw through one buffer, so that memory does not grow with the number of draws."""

import torch
from torch import Generator, Tensor


def perturbed_kth(
    scores: Tensor, k: int, epsilon: float, num_samples: int, generator: Generator | None, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mean k-th largest [rows] of scores [rows, n] over the draws, and which class it was in each [rows, draws]."""
    if epsilon == 0:
        value, index = _kth_largest(scores, k)
        return _nan_rows(scores, value), index[:, None]
    total = scores.new_zeros(len(scores))
    indices = []
    buffer = torch.empty_like(scores, memory_format=torch.contiguous_format)
    for draw in range(num_samples):
        z = buffer.normal_(generator=generator) if noise is None else noise[draw]
        value, index = _kth_largest(torch.add(scores, z, alpha=epsilon, out=buffer), k)
        total += value
        indices.append(index)
    return _nan_rows(scores, total / num_samples), torch.stack(indices, 1)


def differentiable_kth(
    scores: Tensor, k: int, epsilon: float, num_samples: int, generator: Generator | None, noise: Tensor | None
) -> Tensor:
    """The mean k-th largest [rows] by operations that any transform of torch goes through, and that keep no noise."""
    values = []
    for draw in range(num_samples if epsilon else 1):
        z = torch.zeros_like(scores) if not epsilon else noise[draw] if noise is not None else None
        if z is None:
            z = torch.randn(scores.shape, generator=generator, dtype=scores.dtype, device=scores.device)
        x = scores + epsilon * z
        values.append(x.gather(1, _kth_largest(x.detach(), k)[1][:, None])[:, 0])
    return _nan_rows(scores, torch.stack(values).mean(0))


def _kth_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices [rows] of the k-th largest, counted from the nearer end: topk is cheap for small k only."""
    n = x.shape[1]
    values, indices = x.topk(k) if 2 * k <= n + 1 else x.topk(n + 1 - k, largest=False)
    return values[:, -1], indices[:, -1]


def _nan_rows(scores: Tensor, value: Tensor) -> Tensor:
    # topk ranks NaN as a number; amax keeps it, and needs no temporary of the size of the scores
    return torch.where(scores.amax(1).isnan(), torch.nan, value)
