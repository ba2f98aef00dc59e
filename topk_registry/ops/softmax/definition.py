"""log p and log(1 - p) under softmax, exact where p rounds to 0 or to 1, with exact gradients.

With the log-odds l_c = s_c - log sum_{j != c} exp(s_j),

    log p_c = -softplus(-l_c),    log(1 - p_c) = -softplus(l_c),

and neither cancels: the sum over the other classes is taken without class c.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def label_log_probabilities(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p_y and log(1 - p_y), each [B], of softmax of scores [B, n] at labels y [B].

    Example:
        >>> label_log_probabilities(torch.tensor([[40.0, 0.0]]), torch.tensor([0]))  # p_y is 1 in float32
        (tensor([-4.2484e-18]), tensor([-40.]))
    """
    label = label[:, None]
    own = logits.gather(1, label)
    # -inf has no distance to others; the least number in its place leaves a sum even where all others are -inf
    origin = own.detach().masked_fill(own == -torch.inf, 0.0)
    rest = (logits - origin).scatter(1, label, torch.finfo(logits.dtype).min).logsumexp(-1)
    others = rest - (own - origin)[:, 0]  # -l_y
    return -_softplus(others), -_softplus(-others)


def log_probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p and log(1 - p), each [B, n], of softmax of scores [B, n], in O(n).

    Only the top class can have p above 1/2; from p below that 1 - p is safe.
    """
    top = logits.max(-1, keepdim=True).indices
    top_log_p, top_log_not = label_log_probabilities(logits, top[:, 0])
    log_p = logits.log_softmax(-1).scatter(1, top, top_log_p[:, None])
    safe = log_p.scatter(1, top, -1.0)  # a place-holder, for the gradient of log(1 - p) at p = 1 is not finite
    return log_p, torch.log1p(-safe.exp()).scatter(1, top, top_log_not[:, None])


def among_best(scores: Tensor, best: int, label: Tensor | None = None) -> Tensor:
    """1 for the ``best`` classes of largest score, with ties for those above the next largest, and 0 for others.

    Of all classes [B, n], or of labels [B].
    """
    if label is None:
        return (scores > scores.topk(best + 1, dim=-1).values[:, -1:]).to(scores)
    return ((scores >= scores.gather(1, label[:, None])).sum(-1) <= best).to(scores)


def _softplus(x: Tensor) -> Tensor:
    # PyTorch's own threshold of 20 leaves an error of 2e-9, too much in float64
    return F.softplus(x, threshold=40.0)
