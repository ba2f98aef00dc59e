"""Spherical losses, which depend only on the label's logit, the sum of all logits and the sum of all squared logits.

With such a loss, ``SphericalLinear`` trains an output layer of D classes on d features in O(d^2) per sample, for any D.
"""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_plugins._rows import at_labels, wide
from topk_registry import ClassificationLoss, CommonOptions
from topk_registry.ops.masses import widest


class _LogLikelihood(ClassificationLoss):
    """Base class: -log of the label's probability, with probabilities proportional to (logit + shift)^2 + epsilon."""

    epsilon: float = 1.0
    shift: float = 0.0  # added to all logits

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.sub(self._log_total(logits)[:, 0], self._half_log_weight(at_labels(logits, labels)), alpha=2)

    def per_class(self, logits: Tensor) -> Tensor:
        return torch.sub(self._log_total(logits), self._half_log_weight(logits), alpha=2)

    def _half_log_weight(self, logits: Tensor) -> Tensor:
        # 1/2 log((logit + shift)^2 + epsilon); a square would overflow in single precision from 2e19 on
        return torch.hypot(logits + self.shift, logits.new_full((), math.sqrt(self.epsilon))).log()

    def _log_total(self, logits: Tensor) -> Tensor:
        # log sum_i ((logit_i + shift)^2 + epsilon) for each row [B, 1]
        root = math.sqrt(self.epsilon)
        peak, sum_of_squares = _scaled_squares(logits, -self.shift, root)
        ratio = root / peak
        total = torch.addcmul(sum_of_squares, ratio, ratio, value=logits.shape[1])
        return torch.add(total.log(), peak.log(), alpha=2)

    def predictive_logits(self, logits: Tensor) -> Tensor:
        """Return log((logit + self.shift)^2 + self.epsilon). Softmax over the classes gives the probabilities.

        Logits in half precision are first converted to float32.
        """
        # log(x^2 + y^2) without x^2, which overflows in float32 from x = 2e19 on; ONNX has no hypot
        logits = wide(logits)
        x, y = (logits + self.shift).abs(), logits.new_full((), math.sqrt(self.epsilon))
        larger = torch.maximum(x, y)
        return 2 * larger.log() + (torch.minimum(x, y) / larger).square().log1p()

    def from_sums(self, s: Tensor, q: Tensor, logit: Tensor, n: int) -> Tensor:
        """Return the loss of each row from the sum s of n logits, the sum q of their squares, and the label's logit."""
        total = q + 2 * self.shift * s + n * (self.shift**2 + self.epsilon)
        return total.log() - self.predictive_logits(logit)


class LogSphericalSoftmax(_LogLikelihood):
    """Negative log-likelihood of the label if squared logits replace the exponentials of the softmax.

        L(o, c) = log(sum_i o_i^2 + n eps) - log(o_c^2 + eps)

    Here o are the n logits of one sample, c is the label, and eps is the option ``epsilon``. The probability of class i
    is proportional to o_i^2 + eps. A large negative logit means a high probability too. Therefore predict with
    ``loss.predictive_logits(logits)``, not with the argmax of the logits. A logit of -inf does not exclude a class: the
    loss is then NaN. To exclude classes from predictions, use ``loss.predictive_logits(logits).masked_fill(mask,
    -torch.inf)``.

    - Use when: There are so many classes that the cost of the output layer must not depend on the number of classes. In
      this case, use the loss in the layer ``SphericalLinear``.
    - Avoid when: The logits of all classes fit in memory. In this case, start with cross-entropy. Also avoid this loss
      if probabilities must be close to 1. With a linear layer without bias on d features, fewer than
      2 (d + 1) classes can ever reach a probability above 1/2, however many classes there are.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 69.4 and 59.5 (74.5 and 60.5), top-2 on Fashion-MNIST 89.2 and 80.9 (94.6 and
      91.6), top-3 on CIFAR-10N 79.7 and 75.2 (92.4 and 89.2).

    Args:
        epsilon: positive number that keeps the loss finite if the label's logit is 0. This number needs tuning.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogSphericalSoftmax()(torch.tensor([[0.0, 2.0]]), torch.tensor([1])).exp()
        tensor(1.2000)

    Reference: de Brebisson, Vincent. An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family.
    ICLR 2016.
    """

    tuning_grid: ClassVar = {"epsilon": (0.1, 0.3, 1.0)}

    def __init__(self, *, epsilon: Annotated[float, "(0, inf)"] = 1.0, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.epsilon = epsilon


class LogTaylorSoftmax(_LogLikelihood):
    """Negative log-likelihood of the label if the second-order Taylor expansion replaces exp in the softmax.

        L(o, c) = log(n + sum_i o_i + sum_i o_i^2 / 2) - log(1 + o_c + o_c^2 / 2)

    Here o are the n logits of one sample, and c is the label. The probability of class i is proportional to 1 + o_i +
    o_i^2 / 2. Therefore predict with ``loss.predictive_logits(logits)``, not with the argmax of the logits. If you add
    a constant to all logits, the loss changes. A logit of -inf does not exclude a class: the loss is then NaN. To
    exclude classes from predictions, use ``loss.predictive_logits(logits).masked_fill(mask, -torch.inf)``.

    - Use when: There are so many classes that the cost of the output layer must not depend on the number of classes,
      and you do not want to tune an option of the loss. In this case, use the loss in the layer ``SphericalLinear``.
    - Avoid when: The logits of all classes fit in memory. In this case, start with cross-entropy.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 71.2 and 60.6 (74.5 and 60.5), top-2 on Fashion-MNIST 93.9 and 91.6 (94.6 and
      91.6), top-3 on CIFAR-10N 92.1 and 89.7 (92.4 and 89.2). With a small network from scratch: top-5 on 100 names of
      icons 77.1 and 60.2 (79.8 and 61.9), top-2 on Fashion-MNIST 93.5 and 90.3 (93.7 and 89.2).

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
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 62.0 and 55.8 (74.5 and 60.5), top-2 on Fashion-MNIST 94.3 and 92.7 (94.6 and
      91.6), top-3 on CIFAR-10N 91.7 and 89.0 (92.4 and 89.2).

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

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        mean = logits.mean(-1, keepdim=True)
        return _log_partition_bound(logits, mean)[:, 0] - (at_labels(logits, labels) - mean[:, 0])

    def per_class(self, logits: Tensor) -> Tensor:
        mean = logits.mean(-1, keepdim=True)
        return _log_partition_bound(logits, mean) - (logits - mean)

    def from_sums(self, s: Tensor, q: Tensor, logit: Tensor, n: int) -> Tensor:
        """Return the loss of each row from the sum s of n logits, the sum q of their squares, and the label's logit."""
        squares = (q - s.square() / n).clamp(min=0)
        return _bound(torch.ones_like(squares), squares, n) + s / n - logit


def _log_partition_bound(logits: Tensor, mean: Tensor) -> Tensor:
    # Bound on log sum_i exp(o_i - mean) for each row [B, 1]. The bound depends only on v = mean_i (o_i - mean)^2.
    return _bound(*_scaled_squares(logits, mean, 1.0), logits.shape[1])


def _bound(peak: Tensor, sum_of_squares: Tensor, D: int) -> Tensor:
    # The bound from the sum over the D logits of ((s_i - m) / peak)^2, where m is the mean logit. At the tightest xi,
    # the derivative with respect to this sum is the slope lambda(xi) peak^2. The curvature is the derivative of the
    # slope, which depends on the sum through xi. Autograd computes both derivatives from a Taylor series.
    fixed = sum_of_squares.detach()
    with torch.no_grad():
        wide, wide_peak = fixed.to(widest(fixed)), peak.to(widest(fixed))
        half = half_of_xi(wide_peak * (wide / float(D)).sqrt(), D)
        t, _, W_slope = _w_and_slope(half, D)
        ratio, scaled = half / t, half / wide_peak
        slope = 0.125 * t * wide_peak / scaled  # without overflow, because xi grows with the logits
        value = slope * wide + (2 * (D - 1) / D - D / 2 * (1.0 - t).square()) * ratio
        value += float(D) * (-2.0 * half).exp().log1p()
        curvature = slope * (ratio - half * t - 1.0) / (2.0 * wide + 8.0 * D * half * scaled.square() * W_slope)
        curvature = curvature.nan_to_num(0.0, 0.0, 0.0)  # 0/0 for two equal logits
    step = sum_of_squares - fixed
    return value.to(fixed) + step * torch.addcmul(slope.to(fixed), step, curvature.to(fixed), value=0.5)


def half_of_xi(rms: Tensor, D: int) -> Tensor:
    """Return xi/2 for the parameter xi of the tightest bound in :class:`SphericalBound`, for each entry of ``rms``.

    ``rms`` is the square root of the mean of (s_i - m)^2 for D >= 2 logits s with the mean m, in double precision.
    """
    # The equation is xi^2 W(xi) = rms^2. The left side increases with xi, from 0 at xi = log(D-1). For large xi, W is
    # 4 (D-1) / D^2, so xi is rms D / (2 sqrt(D-1)). Newton's method starts at a norm of these two limits. The exponent
    # of the norm grows with log D: then the start is within 5 % of xi, and the error after 4 steps is a rounding error,
    # for D from 3 to 1e8 and any rms.
    least = math.log(D - 1) / 2
    large = rms * (D / (4 * math.sqrt(D - 1)))
    if D == 2:  # W is 1. For equal logits, xi would be 0; a small xi avoids 0/0, and the bound hardly changes.
        return large.clamp(min=5e-5)
    exponent, half_rms = 1.75 + 0.58 * least, 0.5 * rms
    high = large.clamp(min=least)
    half = high * ((large.clamp(max=least) / high) ** exponent + 1.0) ** (1 / exponent)
    for _ in range(4):
        _, W, slope = _w_and_slope(half, D)
        excess = torch.addcmul(W * half, half_rms, half_rms / half, value=-1)
        half = torch.addcdiv(half, excess, torch.addcmul(W, half, slope), value=-0.5)
    return half.clamp(min=least)


def _w_and_slope(half: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    # t = tanh(xi/2), W = 1 - (1 - 2/D)^2 / t^2 and dW/dxi for half = xi/2
    t = half.tanh()
    inverse = t.reciprocal()
    rest = (1 - 2 / D) ** 2 * inverse.square()
    return t, 1.0 - rest, rest * (inverse - t)


def _scaled_squares(logits: Tensor, centre: Tensor | float, least: float) -> tuple[Tensor, Tensor]:
    # Returns a scale p for each row, and sum_i ((s_i - centre) / p)^2, which cannot overflow. Autograd needs no
    # gradient of p, because p^2 times the sum does not depend on p.
    fixed, origin = logits.detach(), centre.detach() if isinstance(centre, Tensor) else centre
    peak = torch.maximum(fixed.amax(-1, keepdim=True) - origin, origin - fixed.amin(-1, keepdim=True)).clamp(min=least)
    # a vector norm would save a temporary, but its error is 1e-3 in single precision at n = 1e6
    return peak, (logits - centre).div_(peak).square().sum(-1, keepdim=True)
