"""Definition of the perturbed k-th largest score in PyTorch operations, with noise from any source."""

import torch
from torch import Generator, Tensor


def perturbed_topk_definition(scores: Tensor, k: int, *, epsilon: float, noise: Tensor) -> Tensor:
    """Return the mean over draws of the k-th largest of s + eps Z, for scores [..., n] and noise [draws, ..., n]."""
    perturbed = scores + epsilon * noise  # [draws, ..., n]
    return perturbed.sort(-1, descending=True).values[..., k - 1].mean(0)


def kth(
    scores: Tensor, k: int, epsilon: float, num_samples: int, generator: Generator | None, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the mean k-th largest score [B] of scores [B, n], and its class in each draw [B, num_samples].

    All draws use one buffer, so that memory does not grow with the number of draws.
    """
    if epsilon == 0:
        value, index = _kth_largest(scores, k)
        return _nan_rows(scores, value), index[:, None]
    total, indices = scores.new_zeros(len(scores)), []
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
    """Return the mean k-th largest score [B] from operations that support all transforms of PyTorch."""
    values = []
    for draw in range(num_samples if epsilon else 1):
        z = torch.zeros_like(scores) if not epsilon else noise[draw] if noise is not None else None
        if z is None:
            if generator is None:  # may be traced with any number of rows
                z = torch.randn_like(scores)
            else:
                z = torch.randn(scores.shape, generator=generator, dtype=scores.dtype, device=scores.device)
        x = scores + epsilon * z
        values.append(x.gather(1, _kth_largest(x.detach(), k)[1][:, None])[:, 0])
    return _nan_rows(scores, torch.stack(values).mean(0))


def hinges(s: Tensor, threshold: Tensor, masses: tuple[Tensor | None, ...], alpha: Tensor, scale: float) -> Tensor:
    """Return sum_c q_c scale (alpha_c + threshold - s_c)_+ [B] for masses (labels, shares, even, dense)."""
    labels, shares, even, dense = masses
    alpha = alpha.to(s)
    if even is None and dense is None:
        assert labels is not None
        assert shares is not None
        q, gap, x = shares.to(s.dtype), alpha[labels] if alpha.ndim else alpha, s.gather(1, labels)
    else:
        q = torch.zeros_like(s) if dense is None else dense.to(s.dtype)
        q = q if even is None else q + even.to(s.dtype)[:, None]
        if labels is not None and shares is not None:
            q = q.scatter_add(1, labels, shares.to(s.dtype))
        gap, x = alpha, s
    violation = (gap + threshold[:, None] - x).clamp(min=0)
    # 0 * inf is NaN; finite losses stay in the product, because they are the gradient of the mass
    return (q * scale * violation.masked_fill((q == 0) & ~violation.isfinite(), 0.0)).sum(1)


def has_mass(masses: tuple[Tensor | None, ...]) -> Tensor:
    """Return whether each row has mass [B, 1]."""
    _, shares, even, dense = masses
    parts = [shares, None if even is None else even[:, None], dense]
    found = [(part != 0).any(1, keepdim=True) for part in parts if part is not None]
    return torch.stack(found).any(0)


def _kth_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return values and indices [B] of the k-th largest. It counts from the nearer end: topk is slow for large k."""
    n = x.shape[1]
    values, indices = x.topk(k) if 2 * k <= n + 1 else x.topk(n + 1 - k, largest=False)
    return values[:, -1], indices[:, -1]


def _nan_rows(scores: Tensor, value: Tensor) -> Tensor:
    # topk ranks NaN as a number; amax propagates NaN and needs no temporary tensor
    return torch.where(scores.amax(1).isnan(), torch.nan, value)
