"""Spherical losses, which depend only on the label's logit, the sum of all logits and the sum of all squared logits.

With such a loss, ``SphericalLinear`` trains an output layer of D classes on d features in O(d^2) per sample, for any D.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_plugins._rows import wide
from topk_registry import ClassificationLoss, CommonOptions
from topk_registry.options import number

XI_MIN = 1e-4
NEWTON_STEPS = 6


class _LogLikelihood(ClassificationLoss):
    """Base class: -log of the label's probability, with probabilities proportional to (logit + shift)^2 + epsilon."""

    epsilon: float = 1.0
    shift: float = 0.0  # added to all logits

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        x = logits + self.shift
        return (_log_sum_of_weights(x, self.epsilon) - _log_weight(x.gather(1, labels[:, None]), self.epsilon))[:, 0]

    def per_class(self, logits: Tensor) -> Tensor:
        x = logits + self.shift
        return _log_sum_of_weights(x, self.epsilon) - _log_weight(x, self.epsilon)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class [B, n]. Logits in half precision are first converted to float32."""
        return self.log_weights(wide(logits)).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        """Return log((score + self.shift)^2 + self.epsilon). Softmax over the classes gives the probabilities."""
        # log(x^2 + y^2) without x^2, which overflows in float32 from x = 2e19 on; ONNX has no hypot
        x, y = (scores + self.shift).abs(), scores.new_full((), math.sqrt(self.epsilon))
        larger = torch.maximum(x, y)
        return 2 * larger.log() + (torch.minimum(x, y) / larger).square().log1p()

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """Return the loss of each row from the sum s of n scores, the sum q of their squares, and the label's score."""
        total = q + 2 * self.shift * s + n * (self.shift**2 + self.epsilon)
        return total.log() - self.log_weights(score)


class LogSphericalSoftmax(_LogLikelihood):
    """Negative log-likelihood of the label if squared logits replace the exponentials of the softmax.

        L(o, c) = log(sum_i o_i^2 + n eps) - log(o_c^2 + eps)

    Here o are the n logits of one sample, c is the label, and eps is the option ``epsilon``. The probability of class i
    is proportional to o_i^2 + eps. A large negative logit means a high probability too. Therefore predict with
    ``loss.probabilities(logits)``, not with the argmax of the logits.

    - Use when: There are so many classes that the cost of the output layer must not depend on the number of classes. In
      this case, use the loss in the layer ``SphericalLinear``.
    - Avoid when: The logits of all classes fit in memory. In this case, start with cross-entropy. Also avoid this loss
      if probabilities must be close to 1. With a linear layer without bias on d features, fewer than
      2 (d + 1) classes can ever reach a probability above 1/2, however many classes there are.

    Args:
        epsilon: positive number that keeps the loss finite if the label's logit is 0. This number needs tuning.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogSphericalSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)

    Reference: de Brebisson, Vincent. An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family.
    ICLR 2016.
    """

    option_ranges: ClassVar = {"epsilon": "(0, inf)"}
    tuning_grid: ClassVar = {"epsilon": (0.1, 0.3, 1.0)}

    def __init__(self, *, epsilon: float = 1.0, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.epsilon = number(epsilon, "epsilon", above=0)

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon:g}, {super().extra_repr()}"


class LogTaylorSoftmax(_LogLikelihood):
    """Negative log-likelihood of the label if the second-order Taylor expansion replaces exp in the softmax.

        L(o, c) = log(n + sum_i o_i + sum_i o_i^2 / 2) - log(1 + o_c + o_c^2 / 2)

    Here o are the n logits of one sample, and c is the label. The probability of class i is proportional to 1 + o_i +
    o_i^2 / 2. Therefore predict with ``loss.probabilities(logits)``, not with the argmax of the logits. If you add a
    constant to all logits, the loss changes.

    - Use when: There are so many classes that the cost of the output layer must not depend on the number of classes,
      and you do not want to tune an option of the loss. In this case, use the loss in the layer ``SphericalLinear``.
    - Avoid when: The logits of all classes fit in memory. In this case, start with cross-entropy.

    Args:
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogTaylorSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)

    Reference: de Brebisson, Vincent. An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family.
    ICLR 2016.
    """

    shift = 1.0  # 1 + o + o^2/2 = ((o + 1)^2 + 1) / 2: spherical softmax of logits + 1 with eps = 1


class SphericalBound(ClassificationLoss):
    """Upper bound on cross-entropy that is quadratic in the logits (Bouchard 2007).

        L(o, c) = m - o_c + (xi/t) ((D-1)/D - D u^2/4) + D log(1 + e^-xi) + lambda(xi) sum_i (o_i - m)^2

    Here o are the D logits of one sample, c is the label, m is the mean of the logits, t = tanh(xi/2), u = 1 - t and
    lambda(xi) = t / (4 xi). Every number xi > 0 gives an upper bound. For each sample, the loss uses the xi with the
    lowest bound. Predict with the softmax, as with cross-entropy.

    - Use when: You need an upper bound on cross-entropy that is quadratic in the logits, for example to update weights
      in closed form.
    - Avoid when: Accuracy matters. The bound is far above cross-entropy if the logits differ much.

    Args:
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> bound, log_softmax = SphericalBound(), torch.nn.CrossEntropyLoss()
        >>> logits, target = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2])
        >>> log_softmax(logits, target), bound(logits, target)
        (tensor(0.4076), tensor(1.1434))

    Reference: Bouchard. Efficient bounds for the softmax function. NIPS workshop 2007. As a loss: de Brebisson,
    Vincent. An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family. ICLR 2016.
    """

    def per_class(self, logits: Tensor) -> Tensor:
        centred = logits - logits.mean(-1, keepdim=True)
        return _log_partition_bound(centred) - centred

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        centred = logits - logits.mean(-1, keepdim=True)
        return (_log_partition_bound(centred) - centred.gather(1, labels[:, None]))[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the softmax of the logits [B, n]. Logits in half precision are first converted to float32."""
        return wide(logits).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        return scores

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """Return the loss of each row from the sum s of n scores, the sum q of their squares, and the label's score."""
        return _quadratic_bound_of_sums(s, q, score, n)


def _log_sum_of_weights(x: Tensor, epsilon: float) -> Tensor:
    # log sum_i (x_i^2 + epsilon) for each row of x [B, n]
    peak, sum_of_squares = _scaled_squares(x, math.sqrt(epsilon))
    return (sum_of_squares + x.shape[1] * (math.sqrt(epsilon) / peak).square()).log() + 2 * peak.log()


def _log_weight(x: Tensor, epsilon: float) -> Tensor:
    # log(x^2 + epsilon) elementwise; x^2 overflows in single precision from x = 2e19 on
    return 2 * torch.hypot(x, x.new_full((), math.sqrt(epsilon))).log()


def _log_partition_bound(centred: Tensor) -> Tensor:
    # Bound on log sum_i exp(c_i) for centered scores c. The bound depends on the scores only through v = mean_i c_i^2.
    # At the tightest xi, the first derivative of the bound with respect to v is D lambda(xi), and the second derivative
    # is D dlambda/dv. Autograd computes both derivatives from a Taylor series around v.
    return _bound(*_scaled_squares(centred, torch.finfo(centred.dtype).tiny), centred.shape[1])


def _quadratic_bound_of_sums(s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
    spread = (q - s.square() / n).clamp(min=0)
    return _bound(torch.ones_like(spread), spread, n) + s / n - score


def _bound(peak: Tensor, sum_of_squares: Tensor, D: int) -> Tensor:
    # the bound from the sum over the D scores of ((s_i - m) / peak)^2, where m is the mean score
    fixed = sum_of_squares.detach()
    with torch.no_grad():
        rms = peak * (fixed / D).sqrt()
        xi = optimal_xi(rms, D)
        u = 2 * torch.sigmoid(-xi)
        t = torch.tanh(xi / 2)
        constant = xi / t * ((D - 1) / D - D / 4 * u.square()) + D * torch.log1p(torch.exp(-xi))
        # lambda peak^2 without overflow: peak / xi is moderate, because xi grows with the scores
        quadratic = t / 4 * (peak / xi) * peak
        W, W_slope = _w(xi, 2 / D)
        xi_slope = 1 / (2 + xi * W_slope / W.clamp(min=torch.finfo(W.dtype).tiny))  # d log xi / d log v
        lambda_slope = (xi * (1 - t.square()) / (2 * t) - 1) * xi_slope  # d log lambda / d log v
        curvature = lambda_slope * (quadratic / fixed.clamp(min=torch.finfo(fixed.dtype).tiny))
        curvature = torch.where(curvature.isfinite(), curvature, 0.0)
    step = sum_of_squares - fixed
    return constant + quadratic * sum_of_squares + curvature / 2 * step.square()


def optimal_xi(rms: Tensor, D: int) -> Tensor:
    """Return the parameter xi of the tightest bound in :class:`SphericalBound`, for each entry of ``rms``.

    ``rms`` is the square root of the mean of (s_i - m)^2 for D >= 2 logits s with the mean m.
    """
    # Let d = 2/D and u = 1 - tanh(xi/2). The equation is xi^2 W = rms^2, with W = (d - u)(2 - d - u) / (1 - u)^2.
    # In this form, nothing cancels for large D. The left side increases with xi. W is at most c^2 = d(2 - d), and W is
    # at least c^2 (1 - u/d) >= (c/1.5)^2 for xi >= log(D-1) + 1. These bounds on W give bounds on xi. Newton's method
    # starts in the middle. After 5 steps, the error is below 1e-9 for D from 3 to 1e8 and any rms.
    d = 2 / D
    c = math.sqrt(d * (2 - d))
    # for D = 2 and equal scores, the limit is xi = 0; XI_MIN avoids 0/0, and the bound hardly depends on xi there
    low = (rms / c).clamp(min=max(math.log(D - 1), XI_MIN))
    if D == 2:  # W is 1
        return low
    high = (1.5 * rms / c).clamp(min=math.log(D - 1) + 1)
    xi = (low + high) / 2
    for _ in range(NEWTON_STEPS):
        W, slope = _w(xi, d)
        xi = (xi - (xi * W - rms * (rms / xi)) / (2 * W + xi * slope)).clamp(low, high)
    return xi


def _w(xi: Tensor, d: float) -> tuple[Tensor, Tensor]:
    # W = 1 - (1-d)^2 / tanh(xi/2)^2, at least 0, and the derivative of W with respect to xi
    u = 2 * torch.sigmoid(-xi)
    t = 1 - u
    slope = 2 * (1 - d) ** 2 * u * (1 - u / 2) / t**3
    return ((d - u) * (2 - d - u) / t**2).clamp(min=0), slope


def _scaled_squares(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    # Returns a scale p for each row, and sum_i (x_i / p)^2, which cannot overflow. Autograd does not need the gradient
    # of p, because p^2 times the sum does not depend on p.
    fixed = x.detach()
    peak = torch.maximum(fixed.amax(-1, keepdim=True), -fixed.amin(-1, keepdim=True)).clamp(min=least)
    # a vector norm would save a temporary, but its error is 1e-3 in single precision at n = 1e6
    return peak, (x / peak).square().sum(-1, keepdim=True)
