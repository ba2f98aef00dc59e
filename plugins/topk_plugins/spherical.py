"""Spherical losses: functions of only the label's logit, the sum and the sum of squares of all logits.

An output layer of D classes on d features is trained exactly in O(d^2), for any D. Two of the losses are
log-likelihoods. Their probabilities are proportional to a polynomial of the logit instead of its exponential,

    spherical softmax  w_i = o_i^2 + eps              Taylor softmax  w_i = 1 + o_i + o_i^2 / 2

The third loss bounds cross-entropy from above. With the first two losses, w_i is not monotonic in o_i, so do not
predict with the argmax of the logits: predict with ``probabilities(logits)``.

Reference: de Brebisson, Vincent. An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family. ICLR
2016.
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
    """L(o, c) = log sum_i w_i - log w_c with w_i = (o_i + shift)^2 + epsilon."""

    epsilon: float = 1.0
    shift: float = 0.0  # added to all logits

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        x = logits + self.shift
        return (_log_sum_of_weights(x, self.epsilon) - _log_weight(x.gather(1, labels[:, None]), self.epsilon))[:, 0]

    def per_class(self, logits: Tensor) -> Tensor:
        x = logits + self.shift
        return _log_sum_of_weights(x, self.epsilon) - _log_weight(x, self.epsilon)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class [B, n], in at least single precision."""
        return self.log_weights(wide(logits)).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        """Return log w_i elementwise. Softmax of log w_i gives the probabilities."""
        # log(x^2 + y^2) from the larger and the smaller: squares overflow in fp32 from 2e19 on, and ONNX has no hypot
        x, y = (scores + self.shift).abs(), scores.new_full((), math.sqrt(self.epsilon))
        larger = torch.maximum(x, y)
        return 2 * larger.log() + (torch.minimum(x, y) / larger).square().log1p()

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """Return the loss from the label's score, the sum s and the sum of squares q of all n scores."""
        total = q + 2 * self.shift * s + n * (self.shift**2 + self.epsilon)
        return total.log() - self.log_weights(score)


class LogSphericalSoftmax(_LogLikelihood):
    """Negative log-likelihood under the spherical softmax.

        L(o, c) = log(sum_i o_i^2 + n eps) - log(o_c^2 + eps)

    Use when:
        The output layer is so large that its cost must not depend on the number of classes (``SphericalLinear``).

    Avoid when:
        Probabilities must be close to 0 or 1: for d features, the maxima of the probabilities of all classes sum to at
        most d + 1. Very negative logits are as likely as very positive logits, because the loss is even.

    Args:
        epsilon: positive constant that keeps the loss finite if the label's logit is 0. This constant needs tuning.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogSphericalSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)
    """

    option_ranges: ClassVar = {"epsilon": "(0, inf)"}
    tuning_grid: ClassVar = {"epsilon": (0.1, 0.3, 1.0)}

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**common)
        self.epsilon = number(epsilon, "epsilon", above=0)

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon:g}, {super().extra_repr()}"


class LogTaylorSoftmax(_LogLikelihood):
    """Negative log-likelihood under the Taylor softmax, the second-order expansion of exp at 0.

        L(o, c) = log(n + sum_i o_i + sum_i o_i^2 / 2) - log(1 + o_c + o_c^2 / 2)

    Adding a constant to all logits changes the loss.

    Use when:
        The output layer is so large that its cost must not depend on the number of classes (``SphericalLinear``), and
        you want a loss without an option to tune.

    Avoid when:
        The logits of all classes fit in memory: start with cross-entropy.

    Args:
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogTaylorSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)
    """

    shift = 1.0  # 1 + o + o^2/2 = ((o + 1)^2 + 1) / 2: spherical softmax of logits + 1 with eps = 1


class SphericalBound(ClassificationLoss):
    """Bouchard's upper bound on cross-entropy that is quadratic in the logits, with the tightest bound per row.

        L(o, c) = m - o_c + (xi/t) ((D-1)/D - D u^2/4) + D log(1 + e^-xi) + lambda(xi) sum_i (o_i - m)^2

    m is the mean of the D logits, t = tanh(xi/2), u = 1 - t and lambda(xi) = t / (4 xi). Every xi gives a bound. For
    the tightest bound, xi solves xi^2 (1 - (1 - 2/D)^2 / t^2) = mean_i (o_i - m)^2. Predict with softmax, as with
    cross-entropy.

    Use when:
        You need a bound on cross-entropy that is quadratic in the logits, for updates in closed form.

    Avoid when:
        Accuracy matters: the bound is loose if scores are far apart. Use cross-entropy.

    Args:
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> bound, log_softmax = SphericalBound(), torch.nn.CrossEntropyLoss()
        >>> logits, target = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2])
        >>> log_softmax(logits, target), bound(logits, target)
        (tensor(0.4076), tensor(1.1434))

    Reference: Bouchard. Efficient bounds for the softmax function. NIPS workshop 2007, and the paper above.
    """

    def per_class(self, logits: Tensor) -> Tensor:
        centred = logits - logits.mean(-1, keepdim=True)
        return _log_partition_bound(centred) - centred

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        centred = logits - logits.mean(-1, keepdim=True)
        return (_log_partition_bound(centred) - centred.gather(1, labels[:, None]))[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return softmax [B, n], in at least single precision."""
        return wide(logits).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        """Return the scores, because the loss predicts with softmax."""
        return scores

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """Return the loss from the label's score, the sum s and the sum of squares q of all n scores."""
        return _quadratic_bound_of_sums(s, q, score, n)


def _log_sum_of_weights(x: Tensor, epsilon: float) -> Tensor:
    """Return log sum_i (x_i^2 + epsilon) [B, 1] of rows [B, n]."""
    peak, sum_of_squares = _scaled_squares(x, math.sqrt(epsilon))
    return (sum_of_squares + x.shape[1] * (math.sqrt(epsilon) / peak).square()).log() + 2 * peak.log()


def _log_weight(x: Tensor, epsilon: float) -> Tensor:
    """Return log(x^2 + epsilon) elementwise, by hypot, because x^2 overflows in single precision from 2e19 on."""
    return 2 * torch.hypot(x, x.new_full((), math.sqrt(epsilon))).log()


def _log_partition_bound(centred: Tensor) -> Tensor:
    """Return the bound [B, 1] on log sum_i exp(c_i) for centered scores [B, D].

    The bound depends on the scores only through v = mean c_i^2. At the tightest xi, its first derivative in v is D
    lambda(xi), and its second derivative is D dlambda/dv. Autograd gets both derivatives from a Taylor series around v.
    """
    return _bound(*_scaled_squares(centred, torch.finfo(centred.dtype).tiny), centred.shape[1])


def _quadratic_bound_of_sums(s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
    """Return the bound from the label's score, the sum s and the sum of squares q of all n scores, elementwise."""
    spread = (q - s.square() / n).clamp(min=0)
    return _bound(torch.ones_like(spread), spread, n) + s / n - score


def _bound(peak: Tensor, sum_of_squares: Tensor, D: int) -> Tensor:
    """Return the bound from the sum of squares of (s_i - m) / peak over the D scores."""
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
    """Return the xi of the tightest bound elementwise, for scores with root mean square ``rms`` around their mean.

    With d = 2/D and u = 1 - tanh(xi/2), the equation is xi^2 W = rms^2 with W = (d - u)(2 - d - u) / (1 - u)^2. This
    form has no cancellation for large D, and its left side increases with xi. The root is bracketed, because W <= c^2 =
    d(2 - d), and W >= c^2 (1 - u/d) >= (c/1.5)^2 from xi = log(D-1) + 1 on. Newton's method from the middle of the
    bracket reaches an error of 1e-9 in 5 steps for D from 3 to 1e8 and any rms. xi and rms are not squared, because
    squares may overflow.
    """
    d = 2 / D
    c = math.sqrt(d * (2 - d))
    # for D = 2 and equal scores, xi = 0 is the limit; XI_MIN avoids 0/0, and the bound is flat there
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
    """Return 1 - (1-d)^2 / tanh(xi/2)^2, clamped to 0, and its derivative."""
    u = 2 * torch.sigmoid(-xi)
    t = 1 - u
    slope = 2 * (1 - d) ** 2 * u * (1 - u / 2) / t**3
    return ((d - u) * (2 - d - u) / t**2).clamp(min=0), slope


def _scaled_squares(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return a scale p [B, 1] for each row, and sum_i (x_i / p)^2 [B, 1], which cannot overflow.

    The scale is detached from autograd, because p^2 times the sum does not depend on p.
    """
    fixed = x.detach()
    peak = torch.maximum(fixed.amax(-1, keepdim=True), -fixed.amin(-1, keepdim=True)).clamp(min=least)
    # a vector norm would save a temporary, but its error is 1e-3 in single precision at n = 1e6
    return peak, (x / peak).square().sum(-1, keepdim=True)
