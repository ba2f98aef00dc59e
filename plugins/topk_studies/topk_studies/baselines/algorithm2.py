"""Algorithm 2 of Berrada, Zisserman and Kumar (2018): the gradient of elementary symmetric polynomials.

Let x be the scores of a row, and e_i = exp(x_i). The polynomial sigma_j is the sum of exp(sum_{i in S} x_i) over all
sets S of j classes. Let delta_j be the derivative of sigma_j with respect to e_i. There are two formulas for delta_j:

    delta_j = sigma_{j-1} - e_i delta_{j-1}                                         (recursion, exact)
    delta_j = sigma_j / e_i - sigma_{j+1} / e_i^2 + .. -+ sigma_{j+p-1} / e_i^p     (series, truncated after p terms)

Suppose that e_l is about r e_i for the other classes l, and let eps be the machine epsilon. The relative error of the
recursion is about eps/r, from rounding. The relative error of the series is about r^p, from truncation. Both errors are
equal at r = eps^(1/(p+1)). For smaller r, the implementation uses the series.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from topk_studies.baselines.divide_conquer import divide_and_conquer


def default_order(k: int) -> int:
    return 1 + k // 5


class LogSigmas(torch.autograd.Function):
    """Logarithms of the elementary symmetric polynomials sigma_{k-1} and sigma_k of the numbers exp(x).

    The forward pass uses Divide and Conquer, and the backward pass uses Algorithm 2.
    """

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
    """Return two pairs P, N [B, n], for j = k - 1 and for j = k. The derivative of sigma_j is exp(P) - exp(N).

    Here sigma_j is the sum of exp(sum_{i in S} x_i) over all sets S of j classes, and ``log_sigma[j]`` [B, 1] is its
    logarithm. The derivative with respect to exp(x_i) is the sum sigma_{j-1} - exp(x_i) sigma_{j-2} + ... The sum of
    the positive terms is exp(P). The sum of the absolute values of the negative terms is exp(N).
    """
    zero = torch.full_like(x, -torch.inf)
    parts = [(zero, zero), (log_sigma[0].expand_as(x), zero)]
    for j in range(2, k + 1):
        P, N = parts[-1]
        parts = [parts[-1], (torch.logaddexp(log_sigma[j - 1], x + N), x + P)]
    return parts


def log_derivative(x: Tensor, log_sigma: Tensor, j: int, P: Tensor, N: Tensor, *, p: int) -> Tensor:
    """Return the derivative of log sigma_j with respect to each x_i [B, n].

    The derivative is exp(x_i) (exp(P) - exp(N)) / sigma_j, with sigma_j, P and N as in :func:`alternating_parts`. If P
    and N are nearly equal, the function computes sum_{m < p} (-1)^m sigma_{j+m} exp(-m x_i) / sigma_j instead.
    """
    exact = torch.exp(x + P - log_sigma[j]) * -torch.expm1(N - P)
    series = sum((-1) ** i * torch.exp(log_sigma[j + i] - log_sigma[j] - i * x) for i in range(p))
    # the size of P and N is about 10, so the error of their difference is about 10 eps
    threshold = (10 * torch.finfo(x.dtype).eps) ** (1 / (p + 1))
    return torch.where(threshold < P - N, exact, series)
