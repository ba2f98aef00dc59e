"""The smooth top-k SVM loss of Berrada, Zisserman and Kumar (2018), computed by one of the algorithms of the paper.

Let x = s/(k tau) for the logits s. Let sigma_j be the sum of exp(sum_{i in S} x_i) over all sets S of j classes that do
not contain the label y. The loss is

    L(s, y) = tau log(exp(alpha/tau) sigma_k + exp(x_y) sigma_{k-1}) - tau log(exp(x_y) sigma_{k-1})

The argument of the first logarithm is a sum over all sets of k classes, in which each set without the label has the
factor exp(alpha/tau). The argument of the second logarithm is the sum over the sets with the label.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from topk_studies.baselines.algorithm2 import LogSigmas, default_order
from topk_studies.baselines.divide_conquer import divide_and_conquer
from topk_studies.baselines.semiring import LINEAR
from topk_studies.baselines.summation import summation

LogSigmaPair = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # x [B, n], k -> log sigma_{k-1}, log sigma_k


def _last_two(log_sigma: Tensor) -> tuple[Tensor, Tensor]:
    return log_sigma[-2], log_sigma[-1]


ALGORITHMS: dict[str, LogSigmaPair] = {
    "summation": lambda x, k: _last_two(summation(x, k)),
    "summation in linear space": lambda x, k: _last_two(summation(x, k, semiring=LINEAR)),
    "divide and conquer": lambda x, k: _last_two(divide_and_conquer(x, k)),
    "divide and conquer in linear space": lambda x, k: _last_two(divide_and_conquer(x, k, semiring=LINEAR)),
    "algorithm 2": lambda x, k: LogSigmas.apply(x, k, default_order(k)),
}


def smooth_topk_svm(
    s: Tensor, y: Tensor, *, k: int, tau: float, alpha: float = 1.0, algorithm: str = "algorithm 2"
) -> Tensor:
    """Return the mean smooth top-k SVM loss of scores s [B, n] for the labels y [B].

    Args:
        k, tau, alpha: as in ``topk_plugins.SmoothTopKSVM``.
        algorithm: algorithm for the elementary symmetric polynomials, a key of ``ALGORITHMS``.

    Example:
        >>> smooth_topk_svm(torch.zeros(1, 3), torch.tensor([0]), k=1, tau=1.0, alpha=0.0)  # log 3
        tensor(1.0986)

    Reference: Berrada, Zisserman, Kumar 2018, Smooth Loss Functions for Deep Top-k Classification, section 4.
    """
    x = s / (k * tau)
    is_label = torch.arange(s.shape[1], device=s.device) == y[:, None]
    others = x[~is_label].view(len(s), -1)
    below, at_k = ALGORITHMS[algorithm](others, k)
    with_label = x[is_label] + below
    return tau * (torch.logaddexp(at_k + alpha / tau, with_label) - with_label).mean()
