"""Losses of the spherical family: functions of the label's logit, the sum and the sum of squares of all logits only.

So an output layer of D classes on d features is trained exactly in O(d^2), whatever D. Two of them are
log-likelihoods, of probabilities in proportion to a polynomial of the logit instead of its exponential,

    spherical softmax  w_i = o_i^2 + eps              Taylor softmax  w_i = 1 + o_i + o_i^2 / 2

and the third bounds cross-entropy from above. Neither of the first two predicts with the argmax of the logits, as
spherical softmax cannot tell o from -o, and Taylor softmax is least at o = -1: predict with ``probabilities(logits)``.

Reference:
    de Brebisson, Vincent. An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family. ICLR 2016.
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
    """L(o, c) = log sum_i w_i - log w_c with weights w_i = (o_i + shift)^2 + epsilon."""

    epsilon: float = 1.0
    shift: float = 0.0  # added to all logits

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        x = logits + self.shift
        return (_log_sum_of_weights(x, self.epsilon) - _log_weight(x.gather(1, labels[:, None]), self.epsilon))[:, 0]

    def per_class(self, logits: Tensor) -> Tensor:
        x = logits + self.shift
        return _log_sum_of_weights(x, self.epsilon) - _log_weight(x, self.epsilon)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The predicted probability of each class [B, n], in fp32 or wider."""
        return self.log_weights(wide(logits)).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        """log w_i, elementwise: the probabilities are their softmax."""
        # log(x^2 + y^2) by the larger and the smaller of the two: the square overflows in fp32 from 2e19 on, and
        # ONNX has no hypot
        x, y = (scores + self.shift).abs(), scores.new_full((), math.sqrt(self.epsilon))
        larger = torch.maximum(x, y)
        return 2 * larger.log() + (torch.minimum(x, y) / larger).square().log1p()

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """The loss from the label's score, the sum s and the sum of squares q of all n scores; see SphericalLinear."""
        total = q + 2 * self.shift * s + n * (self.shift**2 + self.epsilon)
        return total.log() - self.log_weights(score)


class LogSphericalSoftmax(_LogLikelihood):
    """Negative log-likelihood under the spherical softmax.

        L(o, c) = log(sum_i o_i^2 + n eps) - log(o_c^2 + eps)

    Use when:
        The output layer is so large that its cost must not depend on the number of classes (``SphericalLinear``).

    Avoid when:
        Probabilities must be sharp: the sum over classes of the largest possible probability is at most d + 1 for d
        features. The loss is even in the logits: a very negative logit is as likely as a very positive one.

    Args:
        epsilon: keeps the loss finite where the label's logit is 0; above 0, and needs tuning.
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

    The logits' origin matters: adding a constant to all of them changes the loss.

    Use when:
        The output layer is so large that its cost must not depend on the number of classes (``SphericalLinear``). It
        has no option to tune.

    Avoid when:
        The logits of all classes fit in memory: start with cross-entropy.

    Args:
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogTaylorSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)
    """

    shift = 1.0  # 1 + o + o^2/2 = ((o + 1)^2 + 1) / 2: spherical softmax with eps = 1, of logits plus 1


class SphericalBound(ClassificationLoss):
    """Bouchard's upper bound on cross-entropy that is quadratic in the logits, the tightest for each row.

        L(o, c) = m - o_c + (xi/t) ((D-1)/D - D u^2/4) + D log(1 + e^-xi) + lambda(xi) sum_i (o_i - m)^2

    with m the mean of the D logits, t = tanh(xi/2), u = 1 - t and lambda(xi) = t / (4 xi). Every xi gives a bound; the
    tightest solves xi^2 (1 - (1 - 2/D)^2 / t^2) = mean_i (o_i - m)^2. Being a bound on cross-entropy, it predicts with
    softmax.

    Use when:
        You need a bound on cross-entropy that is quadratic in the logits, for updates in closed form.

    Avoid when:
        Accuracy counts: the bound is loose if scores are far apart. Use cross-entropy.

    Args:
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> bound, log_softmax = SphericalBound(), torch.nn.CrossEntropyLoss()
        >>> logits, target = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2])
        >>> log_softmax(logits, target), bound(logits, target)
        (tensor(0.4076), tensor(1.1434))

    Reference:
        Bouchard. Efficient bounds for the softmax function. NIPS workshop 2007, and the paper above.
    """

    def per_class(self, logits: Tensor) -> Tensor:
        centred = logits - logits.mean(-1, keepdim=True)
        return _log_partition_bound(centred) - centred

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        centred = logits - logits.mean(-1, keepdim=True)
        return (_log_partition_bound(centred) - centred.gather(1, labels[:, None]))[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """The predicted probability of each class, softmax [B, n], in fp32 or wider."""
        return wide(logits).softmax(-1)

    def log_weights(self, scores: Tensor) -> Tensor:
        """Return the scores themselves, as a bound on cross-entropy predicts with softmax."""
        return scores

    def from_sums(self, s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
        """The loss from the label's score, the sum s and the sum of squares q of all n scores; see SphericalLinear."""
        return _quadratic_bound_of_sums(s, q, score, n)


def _log_sum_of_weights(x: Tensor, epsilon: float) -> Tensor:
    """log sum_i (x_i^2 + epsilon) of rows [B, n] -> [B, 1]."""
    peak, sum_of_squares = _scaled_squares(x, math.sqrt(epsilon))
    return (sum_of_squares + x.shape[1] * (math.sqrt(epsilon) / peak).square()).log() + 2 * peak.log()


def _log_weight(x: Tensor, epsilon: float) -> Tensor:
    """log(x^2 + epsilon), elementwise; hypot because the square overflows in single precision from 2e19 on."""
    return 2 * torch.hypot(x, x.new_full((), math.sqrt(epsilon))).log()


def _log_partition_bound(centred: Tensor) -> Tensor:
    """The bound on log sum_i exp of centred scores [B, D] -> [B, 1].

    It depends on the scores through v = mean c_i^2 alone. At the tightest xi its slope in v is D lambda(xi), as if xi
    were fixed; its second derivative is D dlambda/dv. A Taylor series around v gives autograd both, and leaves the
    value alone.
    """
    return _bound(*_scaled_squares(centred, torch.finfo(centred.dtype).tiny), centred.shape[1])


def _quadratic_bound_of_sums(s: Tensor, q: Tensor, score: Tensor, n: int) -> Tensor:
    """The bound from the label's score, the sum s and the sum of squares q of all n scores, elementwise."""
    spread = (q - s.square() / n).clamp(min=0)
    return _bound(torch.ones_like(spread), spread, n) + s / n - score


def _bound(peak: Tensor, sum_of_squares: Tensor, D: int) -> Tensor:
    """The bound from the sum of squares of (s_i - m) / peak over the D scores."""
    fixed = sum_of_squares.detach()
    with torch.no_grad():
        rms = peak * (fixed / D).sqrt()
        xi = optimal_xi(rms, D)
        u = 2 * torch.sigmoid(-xi)
        t = torch.tanh(xi / 2)
        constant = xi / t * ((D - 1) / D - D / 4 * u.square()) + D * torch.log1p(torch.exp(-xi))
        # lambda peak^2 without the square: peak / xi is moderate, as xi grows with the scores
        quadratic = t / 4 * (peak / xi) * peak
        W, W_slope = _w(xi, 2 / D)
        xi_slope = 1 / (2 + xi * W_slope / W.clamp(min=torch.finfo(W.dtype).tiny))  # d log xi / d log v
        lambda_slope = (xi * (1 - t.square()) / (2 * t) - 1) * xi_slope  # d log lambda / d log v
        curvature = lambda_slope * (quadratic / fixed.clamp(min=torch.finfo(fixed.dtype).tiny))
        curvature = torch.where(curvature.isfinite(), curvature, 0.0)
    step = sum_of_squares - fixed
    return constant + quadratic * sum_of_squares + curvature / 2 * step.square()


def optimal_xi(rms: Tensor, D: int) -> Tensor:
    """The xi of the tightest bound, for scores of root mean square ``rms`` around their mean, elementwise.

    With d = 2/D and u = 1 - tanh(xi/2) the equation is xi^2 W = rms^2, W = (d - u)(2 - d - u) / (1 - u)^2, free of
    cancellation for large D; its left side grows with xi. As W <= c^2 = d(2 - d), and W >= c^2 (1 - u/d) >= (c/1.5)^2
    from log(D-1) + 1 on, the root is bracketed, and Newton's method from the middle reaches it to 1e-9 in 5 steps for
    D from 3 to 1e8 and any rms. Squares of xi and rms are never formed: they may overflow.
    """
    d = 2 / D
    c = math.sqrt(d * (2 - d))
    # D = 2 on a flat row: xi = 0 is the limit of the bound, which is flat enough there to stay clear of 0/0
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
    """1 - (1-d)^2 / tanh(xi/2)^2, not below 0 by rounding, and its derivative."""
    u = 2 * torch.sigmoid(-xi)
    t = 1 - u
    slope = 2 * (1 - d) ** 2 * u * (1 - u / 2) / t**3
    return ((d - u) * (2 - d - u) / t**2).clamp(min=0), slope


def _scaled_squares(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """A scale p [B, 1] for each row, and sum_i (x_i / p)^2 [B, 1], which cannot overflow.

    The scale is held fixed in the gradient: p^2 times the sum does not depend on it.
    """
    fixed = x.detach()
    peak = torch.maximum(fixed.amax(-1, keepdim=True), -fixed.amin(-1, keepdim=True)).clamp(min=least)
    # a vector norm would spare a temporary, but adds up naively: off by 1e-3 in single precision at n = 1e6
    return peak, (x / peak).square().sum(-1, keepdim=True)
