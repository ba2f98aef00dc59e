"""The log-odds of each class under softmax, from which p, 1 - p and their logs follow without cancellation.

With l_c = log p_c - log(1 - p_c) = s_c - log sum_{j != c} exp(s_j),

    log p_c = log sigmoid(l_c),    log(1 - p_c) = log sigmoid(-l_c),

and both stay exact, with exact gradients, where p_c rounds to 0 or to 1.
"""

import torch
from torch import Tensor


def label_log_odds(logits: Tensor, label: Tensor) -> Tensor:
    """l_y [B] of scores [B, n] at labels y [B].

    Example:
        >>> label_log_odds(torch.tensor([[40.0, 0.0]]), torch.tensor([0]))  # 1 - p_y is lost in float32
        tensor([40.])
    """
    label = label[:, None]
    others = (logits - logits.gather(1, label)).scatter(1, label, -torch.inf)
    return -others.logsumexp(-1)


def log_odds(logits: Tensor) -> Tensor:
    """l [B, n] of scores [B, n], in O(n).

    Only the top class can have p above 1/2, so log(1 - p) is taken from p for all the others.
    """
    log_p = logits.log_softmax(-1)
    top = logits.argmax(-1, keepdim=True)
    log_not = torch.log1p(-log_p.scatter(1, top, -1.0).exp())  # -1: any place-holder with p < 1
    return (log_p - log_not).scatter(1, top, label_log_odds(logits, top[:, 0])[:, None])
