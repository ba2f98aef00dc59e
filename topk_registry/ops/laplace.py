"""The threshold of a row of Laplace distribution functions, in closed form.

It is the threshold of the weights of LapSum, see lapsum/README.md, and close to the one of sigmoids, see
threshold/README.md.
"""

import torch
from torch import Tensor


def laplace_threshold(x: Tensor, k: float) -> Tensor:
    """b [B] with sum_i F(x_i - b) = k of rows x [B, n], F(u) = e^u / 2 for u <= 0, else 1 - e^-u / 2.

    Sums of exponentials are kept as logarithms, so that any gap between scores is bridged. It has no derivative.
    """
    n = x.shape[1]
    x = x.detach().sort(-1, descending=True).values
    below = x.flip(-1).logcumsumexp(-1).flip(-1)  # log sum of e^x over ranks j, j + 1, ... n
    above = (-x).logcumsumexp(-1)  # log sum of e^-x over ranks 1, ... j
    ranks = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
    sums = ranks - 0.5 * (above + x).exp() + 0.5 * ((below - x).exp() - 1)  # sum_i F(x_i - x_j), rising with j
    m = (sums < k).sum(-1, keepdim=True)  # the number of scores above b
    nothing = torch.full_like(x[:, :1], -torch.inf)
    log_a = torch.cat((below, nothing), 1).gather(1, m)[:, 0]  # log 2A
    log_b = torch.cat((nothing, above), 1).gather(1, m)[:, 0]  # log 2B
    excess = m[:, 0].to(x.dtype) - k
    # B v^2 - excess v - A = 0 for v = e^b, by the form of the root that adds
    product = torch.where(excess == 0, log_a + log_b, log_a + log_b - 2 * excess.abs().log())
    root = torch.where(excess == 0, product / 2, excess.abs().log() + torch.log1p(torch.sqrt(1 + product.exp())))
    return torch.where(excess >= 0, root - log_b, log_a - root)
