"""Tensor functions that several losses of this package use."""

import torch
from torch import Tensor

from topk_registry.losses.targets import is_readable


def wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def at_labels(table: Tensor, labels: Tensor) -> Tensor:
    return table.gather(1, labels[:, None])[:, 0]


def nan_if_invalid(losses: Tensor, scores: Tensor) -> Tensor:
    """Return the losses, with NaN for each row that has a NaN score. The gradients of these rows are NaN too.

    Without this function, comparisons and sorts in a loss could hide a NaN score.

    Args:
        losses: losses [B], or [B, n] with one loss per possible label, computed from ``scores`` [B, n].
    """
    if is_readable(scores) and not bool(scores.detach().sum(-1).isnan().any()):
        return losses  # the sum of a row with a NaN is NaN; one pass over the scores instead of ten
    broken = scores.isnan().any(-1, keepdim=True)
    nothing = torch.where(broken, scores, 0.0) * torch.where(broken, torch.nan, 0.0).to(scores.dtype)
    return losses + nothing.sum(-1, keepdim=losses.ndim > 1).to(losses.dtype)


def softmax_log_odds(logits: Tensor) -> Tensor:
    """Return log p - log(1 - p) [B, n] for p = softmax(logits). The result is precise even if p rounds to 1.

    Only the class with the largest logit can have p > 1/2. The log-odds of this class are the difference between the
    largest logit and the logsumexp of all other logits.
    """
    top = logits.max(1, keepdim=True).indices
    log_p = logits.log_softmax(1).scatter(1, top, -1.0)  # placeholder: log(1 - p) has no finite gradient at p = 1
    score = logits.gather(1, top)
    origin = score.detach().masked_fill(score == -torch.inf, 0.0)  # -inf - (-inf) is NaN
    rest = (logits - origin).scatter(1, top, torch.finfo(logits.dtype).min).logsumexp(1, keepdim=True)
    return (log_p - torch.log1p(-log_p.exp())).scatter(1, top, (score - origin) - rest)
