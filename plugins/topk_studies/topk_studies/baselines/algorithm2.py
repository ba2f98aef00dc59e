"""Algorithm 2: an explicit backward pass, with an approximation where the exact recursion cancels.

Let delta_j = d sigma_j / d e_i = sigma_{j-1}(e without i). From sigma_j = sigma_j(e without i) + e_i delta_j,

    delta_j = sigma_{j-1} - e_i delta_{j-1}                                         (upwards, exact)
    delta_j = sigma_j / e_i - sigma_{j+1} / e_i^2 + .. -+ sigma_{j+p-1} / e_i^p     (downwards, truncated at order p)

The first recursion is imprecise if e_i outweighs the other classes. In this case, the second recursion converges. Let r
be the weight of the other classes relative to e_i. The error of the first recursion is eps/r, and the error of the
second is r^p. Both errors are equal at r = eps^(1/(p+1)), so the implementation switches there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from topk_studies.baselines.divide_conquer import divide_and_conquer


def default_order(k: int) -> int:
    return 1 + k // 5


class LogSigmas(torch.autograd.Function):
    """Compute (log sigma_{k-1}, log sigma_k) of exp(x): forward by Divide and Conquer, backward by Algorithm 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, p: int) -> tuple[Tensor, Tensor]:
        p = min(p, x.shape[1] - k + 1)  # sigma_{k+p-1} must exist
        log_sigma = divide_and_conquer(x, k + p - 1)
        ctx.save_for_backward(x, log_sigma)
        ctx.k, ctx.p = k, p
        return log_sigma[k - 1], log_sigma[k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_below: Tensor, grad_k: Tensor) -> tuple[Tensor, None, None]:
        x, log_sigma = ctx.saved_tensors
        log_sigma = log_sigma[..., None]  # [k+p, B, 1]
        below, at_k = alternating_parts(x, log_sigma, ctx.k)
        grad = grad_k[:, None] * log_derivative(x, log_sigma, ctx.k, *at_k, p=ctx.p)
        if ctx.k > 1:
            grad += grad_below[:, None] * log_derivative(x, log_sigma, ctx.k - 1, *below, p=ctx.p)
        return grad, None, None


def alternating_parts(x: Tensor, log_sigma: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """Return (log P_j, log N_j) for j = k-1, k: the sums of the positive and negative terms of delta_j = P_j - N_j."""
    zero = torch.full_like(x, -torch.inf)
    parts = [(zero, zero), (log_sigma[0].expand_as(x), zero)]
    for j in range(2, k + 1):
        P, N = parts[-1]
        parts = [parts[-1], (torch.logaddexp(log_sigma[j - 1], x + N), x + P)]
    return parts


def log_derivative(x: Tensor, log_sigma: Tensor, j: int, P: Tensor, N: Tensor, *, p: int) -> Tensor:
    """Return d log sigma_j / d x_i = e_i delta_j / sigma_j [B, n]."""
    exact = torch.exp(x + P - log_sigma[j]) * -torch.expm1(N - P)
    series = sum((-1) ** i * torch.exp(log_sigma[j + i] - log_sigma[j] - i * x) for i in range(p))
    # P and N are logarithms of magnitude 10, so the error of their difference is about 10 eps
    threshold = (10 * torch.finfo(x.dtype).eps) ** (1 / (p + 1))
    return torch.where(threshold < P - N, exact, series)
