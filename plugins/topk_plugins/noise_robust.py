"""Losses for noisy labels: generalized cross-entropy, epsilon-softmax, LDR-KL and ALDR-KL.

LDR-KL and ALDR-KL are label-distributionally robust losses. For the logits s and the label y, let z_y = 0, and z_l =
s_l - s_y + gap for every other class l. For a distribution p on the n classes, take the mean of z under p, and subtract
a penalty for the divergence of p from the uniform distribution. The loss is the maximum of this difference over all p:

    LDR-KL = max_p (sum_l p_l z_l - lambda KL(p || uniform)) = lambda log mean_l exp(z_l / lambda)

For lambda = 1 and gap = 0, LDR-KL is cross-entropy minus log n. ALDR-KL computes lambda for each sample.
"""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from topk_plugins._rows import nan_if_invalid, softmax_log_odds
from topk_registry import ClassificationLoss, CommonOptions, Masses, SoftmaxLoss, TopKLoss

STEPS = 14  # evaluations of the divergence in ALDR-KL; 3 to 6 are enough unless two solutions nearly coincide
ROUNDING = 32.0  # the rounding error of a Newton step is below ROUNDING * eps * lambda_0
SETTLED = 1000.0  # the search has converged if the last Newton step is below lambda_0 / SETTLED
HALF = -0.5  # if the mean of expm1 exceeds HALF, log1p of the mean is precise; else the logarithm of the sum is
LEAST = -1e30  # replaces -inf, because 0 * inf is NaN
LEAST_M = 0.1  # if m is at least LEAST_M, 1 - (1 - p) / (1 + m) is precise


class GeneralisedCrossEntropy(SoftmaxLoss):
    """Generalized cross-entropy: cross-entropy with less weight on samples whose label has a low probability.

        L(s, y) = (1 - p_y^q) / q,    p = softmax(s)

    Here s are the n logits of one sample, y is the label, and p_y is the probability of the label. The gradient is
    p_y^q times the gradient of cross-entropy. Wrong labels tend to have a low probability, so wrong labels have less
    influence.

    - Use when: Labels are noisy, and top-1 accuracy matters.
    - Avoid when: Labels are clean. With many classes, also avoid ``q`` near 1, because training starts slowly.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 73.4 and 60.6 (74.5 and 60.5), top-2 on Fashion-MNIST 94.5 and 92.5 (94.6 and
      91.6), top-3 on CIFAR-10N 92.1 and 90.0 (92.4 and 89.2). With a small network from scratch: top-5 on 100 names of
      icons 80.6 and 68.7 (79.8 and 61.9), top-2 on Fashion-MNIST 93.6 and 90.6 (93.7 and 89.2).

    Args:
        q: exponent, above 0 and at most 1. As q goes to 0, the loss becomes cross-entropy. For q = 1, the loss is 1 -
            p_y, which is half of the absolute error between p and the one-hot label. The paper uses the default, 0.7.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> GeneralisedCrossEntropy(q=1.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.7500)

    Reference: Zhang, Sabuncu. Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels.
    NeurIPS 2018.
    """

    tuning_grid: ClassVar = {"q": (0.3, 0.5, 0.7)}

    def __init__(self, *, q: Annotated[float, "(0, 1]"] = 0.7, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.q = q

    def curve(self, nll: Tensor) -> Tensor:
        return -torch.expm1(-self.q * nll) / self.q


class EpsilonSoftmax(TopKLoss):
    """Cross-entropy with epsilon-softmax in place of softmax, plus an absolute error, for noisy labels.

        L(s, y) = -alpha log((p_y + m [y in T]) / (1 + k m)) + 2 beta (1 - p_y),    p = softmax(s)

    Here s are the n logits of one sample, y is the label, and T is the set of the k classes with the highest logits.
    The bracket is 1 if the label is in T, and 0 otherwise. The fraction is the epsilon-softmax probability of the
    label: m is added to the softmax probability of each class in T, and all n numbers are divided by their sum.
    If classes tie for the last place in T, none of these classes is in T.

    If the label is outside T, the gradient of the first term is alpha times the gradient of cross-entropy. If the label
    is in T, the first term has almost no gradient for large ``m``. The second term has a gradient in both cases, so
    with a large ``beta`` the model also learns wrong labels. For m = 0 and beta = 0, the loss is alpha times
    cross-entropy. If m > 0, the loss is discontinuous where the label enters T.

    - Use when: Labels are noisy, a wrong label can be any class, and top-1 accuracy matters. In this case, keep k = 1.
    - Avoid when: Labels are clean, because a label in T has almost no gradient. Also avoid this loss if you cannot tune
      ``alpha`` and ``m``, because the authors use very different values for different data sets.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 74.4 and 59.4 (74.5 and 60.5), top-2 on Fashion-MNIST 94.6 and 91.2 (94.6 and
      91.6), top-3 on CIFAR-10N 92.4 and 89.1 (92.4 and 89.2).

    Args:
        k: number of classes in T, 1 <= k < n. The paper uses k = 1.
        m: number that is added to the probabilities of the classes in T, at least 0. The authors use 100 to 100,000.
        alpha: factor of the first term, at least 0. The authors use 0.001 to 0.1.
        beta: factor of the absolute error, at least 0.
        floor: lower bound on the fraction inside the logarithm, in [0, 1). The default 0 sets no bound, as in the
            paper's equations. The authors' code uses 1e-8. With 1e-8, k = 1 and m = 10,000, the first term has no
            gradient for a label outside T with p_y below 0.0001.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> EpsilonSoftmax(m=1.0, alpha=1.0, beta=0.0)(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
        tensor(2.0064)

    Reference: Wang, Zhou, Zhai, Jiang, Ji, Liu. Epsilon-Softmax: Approximating One-Hot Vectors for Mitigating Label
    Noise. NeurIPS 2024.
    """

    tuning_grid: ClassVar = {"alpha": (0.01, 0.1, 1.0), "m": (1e2, 1e4)}

    def __init__(
        self,
        k: int = 1,
        *,
        m: Annotated[float, "[0, inf)"] = 1e4,
        alpha: Annotated[float, "[0, inf)"] = 0.1,
        beta: Annotated[float, "[0, inf)"] = 1.0,
        floor: Annotated[float, "[0, 1)"] = 0.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(k, **common)
        self.m = m
        self.alpha = alpha
        self.beta = beta
        self.floor = floor

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        nll = F.cross_entropy(logits, labels, reduction="none")
        if self.m == 0:
            return self._loss(nll, None)
        score = logits.gather(1, labels[:, None])
        return self._loss(nll, (logits >= score).sum(1) <= self.k)

    def per_class(self, logits: Tensor) -> Tensor:
        nll = -logits.log_softmax(1)
        excluded = nll == torch.inf
        among = None if self.m == 0 else logits > logits.topk(self.k + 1, dim=1).values[:, -1:]
        table = self._loss(nll.masked_fill(excluded, 1.0), among)
        return torch.where(excluded, self._loss(nll.new_full((), torch.inf), None).detach(), table)

    def _loss(self, nll: Tensor, among: Tensor | None) -> Tensor:
        # nll is -log p, and among is True where the label is in T; None: no label is in T
        apart = math.log1p((self.k - 1) * (self.m / (1 + self.m)))  # log((1 + k m) / (1 + m)) without overflow
        log_sum = math.log1p(self.m) + apart
        not_p = -torch.expm1(-nll)
        error = 2 * self.beta * not_p
        if self.alpha == 0:  # 0 times the infinite loss of an excluded class would be NaN
            return error
        log_pushed = -nll - log_sum
        if among is not None:
            if self.m >= LEAST_M:
                within = torch.log1p(-not_p / (1 + self.m)) - apart
            else:
                within = torch.logaddexp(-nll, nll.new_tensor(self.m).log()) - log_sum
            log_pushed = torch.where(among, within, log_pushed)
        if self.floor > 0:
            log_pushed = log_pushed.clamp(min=math.log(self.floor))
        return error - self.alpha * log_pushed


class LDRKL(ClassificationLoss):
    """LDR-KL: cross-entropy with a temperature, and with a required margin between the label and the other classes.

        L(s, y) = lambda log(1/n sum_l exp((s_l - s_y + c [l != y]) / lambda))

    Here s are the n logits of one sample, y is the label, and the sum is over all classes l. The bracket is 0 for l = y
    and 1 for the other classes. The loss may be negative. If all logits are equal and c = 0, the loss is 0.

    - Use when: You want cross-entropy with a temperature and a required margin, or a baseline for ``aldr_kl``.
    - Avoid when: You do not tune the options. At temperature 1 and gap 0, the loss is cross-entropy minus log n.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 74.5 and 60.8 (74.5 and 60.5), top-2 on Fashion-MNIST 94.7 and 91.6 (94.6 and
      91.6), top-3 on CIFAR-10N 92.5 and 89.6 (92.4 and 89.2).

    Args:
        temperature: lambda, positive.
        gap: c, the required margin of the label, at least 0.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LDRKL(gap=0.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.)

    Reference: Zhu, Ying, Yang. Label Distributionally Robust Losses for Multi-class Classification: Consistency,
    Robustness and Adaptivity. ICML 2023.
    """

    tuning_grid: ClassVar = {"temperature": (0.3, 1.0, 3.0), "gap": (0.0, 1.0)}

    def __init__(
        self,
        *,
        temperature: Annotated[float, "(0, inf)"] = 1.0,
        gap: Annotated[float, "[0, inf)"] = 1.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**common)
        self.temperature = temperature
        self.gap = gap

    def predictive_logits(self, logits: Tensor) -> Tensor:
        return logits / self.temperature

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        near, mean = self._near(logits, logits.gather(1, labels[:, None]))
        shift = torch.full((len(logits), 1), -self.gap / self.temperature, dtype=logits.dtype, device=logits.device)
        x = (logits / self.temperature).scatter_add(1, labels[:, None], shift)
        far = self.temperature * (F.cross_entropy(x, labels, reduction="none") - math.log(logits.shape[1]))
        return torch.where(mean > HALF, near, far[:, None])[:, 0]

    def per_class(self, logits: Tensor) -> Tensor:
        near, mean = self._near(logits, logits)
        odds = softmax_log_odds(logits / self.temperature)
        nll = F.softplus(self.gap / self.temperature - odds, threshold=40.0)
        return torch.where(mean > HALF, near, self.temperature * (nll - math.log(logits.shape[1])))

    def _near(self, s: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        # Returns losses in a form that is precise at a large temperature, and a mean of expm1. The losses are valid
        # where the mean exceeds HALF.
        a = s.detach().amax(-1, keepdim=True)  # detached: the losses do not depend on the origin
        own = (score - a) / self.temperature
        less = math.expm1(-self.gap / self.temperature)  # the term of the label has no gap
        mean = ((s - a) / self.temperature).expm1().mean(-1, keepdim=True) + less / s.shape[1] * own.exp()
        return self.gap + (a - score) + self.temperature * mean.clamp(min=HALF).log1p(), mean


class ALDRKL(ClassificationLoss):
    """ALDR-KL: the loss LDR-KL (``ldr_kl``) with a temperature that the loss computes for each sample.

        L(s, y) = lambda log(1/n sum_l exp(z_l / lambda)) - alpha log(n) (lambda - lambda_0)^2 / (2 lambda_0),
        lambda = lambda_0 (1 - KL(p, uniform) / (alpha log n))

    Here s are the n logits of one sample, y is the label, z_y = 0, z_l = s_l - s_y + gap for each other class l, and
    p = softmax(z / lambda). KL(p, uniform) is the Kullback-Leibler divergence of p from the uniform distribution. The
    temperature lambda is the largest solution of the second equation. This lambda maximizes the first expression. If
    the logits of a sample clearly favor one class, lambda is small, but at least lambda_0 (1 - 1 / alpha).

    The loss solves the second equation by Newton's method in every call and stores nothing. (The authors store lambda
    for every training sample and update lambda once per epoch.) For small ``alpha``, the equation can have several
    solutions. Then lambda jumps as the logits change, and the loss is not continuous. Near a jump, single and double
    precision may give different results. For alpha below 1.2, the loss does not always find the largest solution.

    If the target of a sample is a distribution q over the classes, then z = s - sum_c q_c s_c + gap (1 - q), as in the
    authors' code. There is one lambda per sample, so this loss is not sum_c q_c L(s, c).
    With class weights w, let W = sum_c w_c q_c. The loss of the sample is W times the loss for the target w_c q_c / W.

    - Use when: All layers are trained, labels are noisy, and you cannot correct the labels.
    - Avoid when: Each step must be as fast as with cross-entropy, because the loss solves an equation for each sample.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 74.2 and 60.1 (74.5 and 60.5), top-2 on Fashion-MNIST 94.9 and 91.9 (94.6 and
      91.6), top-3 on CIFAR-10N 92.4 and 89.2 (92.4 and 89.2). With a small network from scratch: top-5 on 100 names of
      icons 81.6 and 65.7 (79.8 and 61.9), top-2 on Fashion-MNIST 93.9 and 90.7 (93.7 and 89.2).

    Args:
        temperature: lambda_0, the largest temperature of a sample, positive.
        alpha: number above 1. The larger alpha is, the closer lambda stays to lambda_0.
        gap: required margin of the label, at least 0.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> ALDRKL(gap=0.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.)

    Reference: Zhu, Ying, Yang. Label Distributionally Robust Losses for Multi-class Classification: Consistency,
    Robustness and Adaptivity. ICML 2023.
    """

    tuning_grid: ClassVar = {"temperature": (0.3, 1.0, 3.0), "alpha": (1.5, 3.0)}

    def __init__(
        self,
        *,
        temperature: Annotated[float, "(0, inf)"] = 1.0,
        alpha: Annotated[float, "(1, inf)"] = 2.0,
        gap: Annotated[float, "[0, inf)"] = 1.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**common)
        self.temperature = temperature
        self.gap = gap
        self.alpha = alpha

    def predictive_logits(self, logits: Tensor) -> Tensor:
        """Return the logits divided by lambda_0, the largest temperature of a sample."""
        return logits / self.temperature

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        own = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
        x = torch.where(own, logits, logits + self.gap)
        a = x.detach().amax(-1, keepdim=True)  # detached: the losses do not depend on the origin
        return nan_if_invalid(self._above(x - a) + (a - logits.gather(1, labels[:, None]))[:, 0], logits)

    def per_class(self, logits: Tensor) -> Tensor:
        own = torch.eye(logits.shape[1], dtype=torch.bool, device=logits.device)
        x = torch.where(own, logits[:, None], logits[:, None] + self.gap)  # [B, n, n]
        a = x.detach().amax(-1, keepdim=True)
        return nan_if_invalid(self._above(x - a) + (a[..., 0] - logits), logits)

    def losses_of(self, logits: Tensor, masses: Masses) -> Tensor:
        if masses.labels is not None and masses.even is None and masses.labels.shape[1] == 1:
            return super().losses_of(logits, masses)
        s = masses.usable(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits)
        target = masses.table(s.shape[1], s.dtype)
        mass = target.sum(-1, keepdim=True)
        q = target / torch.where(mass == 0, 1.0, mass)
        x = s + self.gap * (1 - q)
        a = x.detach().amax(-1, keepdim=True)
        ahead = torch.where(q == 0, 0.0, q * (a - s)).sum(-1)
        return nan_if_invalid(mass[:, 0] * (self._above(x - a) + ahead), s)

    def _above(self, z: Tensor) -> Tensor:
        # the maximum over lambda [...] of the loss, for z [..., n] <= 0
        z, log_n = z.clamp(min=LEAST), math.log(z.shape[-1])
        stiffness = self.alpha * log_n / self.temperature
        lam = self._solve(z.detach(), stiffness)
        # a Newton step makes lambda a differentiable function of z, for second derivatives
        divergence, slope, _ = _divergence(z, lam)
        excess = stiffness * (self.temperature - lam) - divergence
        steepness = (stiffness + slope).detach()
        # where two solutions merge, the search has not converged: no derivative there
        stable = steepness * self.temperature > SETTLED * excess.detach().abs()
        lam = lam + torch.where(stable, excess / torch.where(stable, steepness, 1.0), 0.0)
        return lam * _log_mean_exp(z / lam[..., None]) - 0.5 * stiffness * (lam - self.temperature) ** 2

    def _solve(self, z: Tensor, stiffness: float) -> Tensor:
        # the largest solution lambda [...]: Newton's method starts at lambda_0, the largest possible value
        least = self.temperature * (1 - 1 / self.alpha)
        rounding = ROUNDING * torch.finfo(z.dtype).eps * self.temperature

        def tried(lam: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            divergence, slope, concave = _divergence(z, lam)
            return lam, self.temperature - lam - divergence / stiffness, 1 + slope / stiffness, concave

        lam, step, steepness, concave = tried(torch.full_like(z[..., 0], self.temperature))
        low = torch.full_like(lam, -torch.inf)  # the last lambda below the solution
        certain = torch.zeros_like(concave)  # True where no further Newton step can pass the solution
        for _ in range(STEPS - 1):
            certain = certain | (concave & (step <= 0))
            newton = lam + step / torch.where(steepness > 0, steepness, 1.0)
            half_way = (lam + low.clamp(min=least)) / 2
            there = tried(torch.where((steepness > 0) & (newton > low), newton.clamp(min=least), half_way))
            beyond = ~certain & (there[1] > rounding)
            low = torch.where(certain, -torch.inf, torch.where(beyond, there[0], low))
            here = lam, step, steepness, concave
            lam, step, steepness, concave = (torch.where(beyond, a, b) for a, b in zip(here, there, strict=True))
        return lam


def _log_mean_exp(u: Tensor) -> Tensor:
    # log mean exp(u) [...] for u [..., n] <= 0, precise even if all u are close to 0
    mean = u.expm1().mean(-1)
    near = mean.clamp(min=HALF).log1p()
    return torch.where(mean > HALF, near, u.logsumexp(-1) - math.log(u.shape[-1]))


def _divergence(z: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Returns KL(p || uniform) [...] for p = softmax(z / lambda), its derivative with respect to lambda, and a boolean:
    # True where the divergence is a concave function of lambda.
    u = z / lam[..., None]
    ahead = u - _log_mean_exp(u)[..., None]  # log(n p), precise near 0
    p = ahead.exp() / z.shape[-1]
    divergence = torch.where(p == 0, 0.0, p * ahead).sum(-1)
    centred = torch.where(p == 0, 0.0, ahead - divergence[..., None]).detach()
    square = p * centred**2
    variance = square.sum(-1)
    concave = 3 * variance + (square * centred).sum(-1) <= 0
    return divergence, -variance / lam, concave
