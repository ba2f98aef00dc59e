"""Functions of scores [B, n] that several losses share."""

import torch
from torch import Tensor


def wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def at_labels(table: Tensor, labels: Tensor) -> Tensor:
    return table.gather(1, labels[:, None])[:, 0]


def nan_if_invalid(losses: Tensor, scores: Tensor) -> Tensor:
    """Set the losses and gradients of rows with a NaN score to NaN, because comparisons and sorts would hide the NaN.

    ``losses`` is [B] or, for each possible label, [B, n]. Valid scores are not multiplied by 0: 0 times -inf is NaN.
    """
    broken = scores.isnan().any(-1, keepdim=True)
    nothing = torch.where(broken, scores, 0.0) * torch.where(broken, torch.nan, 0.0).to(scores.dtype)
    return losses + nothing.sum(-1, keepdim=losses.ndim > 1).to(losses.dtype)


def one_minus_p(nll: Tensor) -> Tensor:
    """Return 1 - p from -log p, at least the smallest normal number, so that powers and logs have finite gradients."""
    return (-torch.expm1(-nll)).clamp(min=torch.finfo(nll.dtype).tiny)


def softmax_log_odds(logits: Tensor) -> Tensor:
    """Return log p - log(1 - p) [B, n] for p = softmax(logits), precise even if p rounds to 1.

    Only the class with the largest score can have p above 1/2. Its odds come from the sum over all other classes.
    """
    top = logits.max(1, keepdim=True).indices
    log_p = logits.log_softmax(1).scatter(1, top, -1.0)  # placeholder: log(1 - p) has no finite gradient at p = 1
    score = logits.gather(1, top)
    origin = score.detach().masked_fill(score == -torch.inf, 0.0)  # -inf - (-inf) is NaN
    rest = (logits - origin).scatter(1, top, torch.finfo(logits.dtype).min).logsumexp(1, keepdim=True)
    return (log_p - torch.log1p(-log_p.exp())).scatter(1, top, (score - origin) - rest)
