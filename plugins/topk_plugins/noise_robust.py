"""Losses for labels that are wrong anywhere: generalized cross-entropy, epsilon-softmax, label-distributionally robust.

Epsilon-softmax adds m to the probabilities of the set T of the k best classes: p' = (p + m [i in T]) / (1 + k m). The
paper has k = 1. Then p' - e_t = (p - e_t) / (1 + m) for the best class t, so p' is close to one-hot. If the label is
outside T, cross-entropy of p' has the gradient of cross-entropy of p. If the label is in T, the gradient is almost
zero.

The label-distributionally robust losses compare the label with the worst-case distribution p over the n classes. With
z_l = s_l - s_y + gap [l != y],

    L = max_p  sum_l p_l z_l - lambda KL(p || uniform)  =  lambda log mean_l exp(z_l / lambda).

At lambda = 1 without a gap, this is cross-entropy minus log n. ALDR-KL chooses lambda for each sample.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from topk_plugins._rows import nan_if_invalid, softmax_log_odds
from topk_registry import ClassificationLoss, CommonOptions, SoftmaxLoss, TopKLoss
from topk_registry.losses.targets import Masses
from topk_registry.options import number

STEPS = 14  # evaluations of the divergence in ALDR-KL; 3 to 6 suffice unless two solutions nearly coincide
ROUNDING = 32.0  # times eps and the size of a term: rounding error of a step
SETTLED = 1000.0  # the search has converged if lambda_0 is this many times the last step
HALF = -0.5  # above this mean of expm1, log1p of the mean is precise; below, the logarithm of the sum is
LEAST = -1e30  # replaces -inf, because 0 * inf is NaN
LEAST_M = 0.1  # from this m on, 1 - (1 - p) / (1 + m) is precise


class GeneralisedCrossEntropy(SoftmaxLoss):
    r"""Generalized cross-entropy: a power replaces the logarithm, so that samples with unlikely labels get less weight.

    .. math:: L(s, y) = \frac{1 - p_y^q}{q}, \qquad p = \mathrm{softmax}(s)

    Use when:
        Labels are wrong anywhere, and top-1 accuracy matters. ``q`` interpolates between cross-entropy (0) and the
        absolute error (1), which is robust to wrong labels. In the study here over four kinds of noise, q = 0.3 gained
        2.0 points of top-1.

    Avoid when:
        Labels are clean, or there are many classes, because near q = 1 training starts slowly. The default is the
        paper's q = 0.7.

    Args:
        q: exponent in (0, 1]. As q goes to 0, the loss becomes cross-entropy. At 1, the loss is half the absolute error
            of p.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> GeneralisedCrossEntropy(q=1.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.7500)

    Reference: Zhang, Sabuncu. Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels.
    NeurIPS 2018.
    """

    option_ranges: ClassVar = {"q": "(0, 1]"}
    tuning_grid: ClassVar = {"q": (0.3, 0.5, 0.7)}

    def __init__(self, *, q: float = 0.7, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.q = number(q, "q", above=0, at_most=1)

    def curve(self, nll: Tensor) -> Tensor:
        return -torch.expm1(-self.q * nll) / self.q

    def extra_repr(self) -> str:
        return f"q={self.q:g}, {super().extra_repr()}"


class EpsilonSoftmax(TopKLoss):
    r"""Cross-entropy of epsilon-softmax plus an absolute error, for noisy labels.

    .. math:: L(s, y) = -\alpha \log \frac{p_y + m\,[y \in T]}{1 + k m} + 2 \beta (1 - p_y),
        \qquad p = \mathrm{softmax}(s)

    T is the set of the k best classes. With ties, T has the classes above the (k + 1)-th largest score. The paper has k
    = 1. The gradient of the first term vanishes once the label is in T. The gradient of the second term does not, so
    that a large ``beta`` also fits wrong labels. At m = 0 and beta = 0, the loss is alpha times cross-entropy. The loss
    is discontinuous where the label enters T, and its minimum is about alpha log k.

    Use when:
        Wrong labels can be any class, and top-1 accuracy matters. In the study here over four kinds of noise, k = 1
        gained 1.5 points of top-1, and k = 5 was 5.4 points of top-5 behind cross-entropy.

    Avoid when:
        Labels are clean, because a label in T has almost no gradient. You cannot tune ``alpha`` and ``m``: the authors'
        values differ between data sets by a factor of 80.

    Args:
        k: size of the set, 1 <= k < n.
        m: number that is added to the probabilities of the classes in T, at least 0. The authors use 100 to 100,000.
        alpha: factor of the cross-entropy of epsilon-softmax, at least 0. The authors use 0.001 to 0.1.
        beta: factor of the absolute error, at least 0.
        floor: lower bound on the probability inside the logarithm, in [0, 1). The paper's equations have no such bound.
            The authors' code has 1e-8: with m = 10,000, a label with p below 0.0001 then has no gradient.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> EpsilonSoftmax(m=1.0, alpha=1.0, beta=0.0)(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
        tensor(2.0064)

    Reference: Wang, Zhou, Zhai, Jiang, Ji, Liu. Epsilon-Softmax: Approximating One-Hot Vectors for Mitigating Label
    Noise. NeurIPS 2024.
    """

    option_ranges: ClassVar = {"m": "[0, inf)", "alpha": "[0, inf)", "beta": "[0, inf)", "floor": "[0, 1)"}
    tuning_grid: ClassVar = {"alpha": (0.01, 0.1, 1.0), "m": (1e2, 1e4)}

    def __init__(
        self,
        k: int = 1,
        *,
        m: float = 1e4,
        alpha: float = 0.1,
        beta: float = 1.0,
        floor: float = 0.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(k, **common)
        self.m, self.alpha = number(m, "m", at_least=0), number(alpha, "alpha", at_least=0)
        self.beta, self.floor = number(beta, "beta", at_least=0), number(floor, "floor", at_least=0, below=1)

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
        """Return the loss. ``nll`` is -log p, and ``among`` says whether the label is in T."""
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

    def extra_repr(self) -> str:
        own = f"m={self.m:g}, alpha={self.alpha:g}, beta={self.beta:g}, floor={self.floor:g}"
        return f"{own}, {super().extra_repr()}"


class LDRKL(ClassificationLoss):
    r"""LDR-KL: log-mean-exp over all classes of the class's score minus the label's score, plus a gap.

    .. math:: L(s, y) = \lambda \log \frac1n \sum_l \exp\frac{s_l - s_y + c\,[l \ne y]}{\lambda}

    The loss may be negative. With equal scores and no gap, the loss is 0.

    Use when:
        You want a required margin and a temperature in cross-entropy, or a baseline for ``aldr_kl``. This class
        implements the paper. No study here has evaluated the loss.

    Avoid when:
        You do not tune the options: at temperature 1 and gap 0, the loss is cross-entropy minus a constant.

    Args:
        temperature: lambda, positive.
        gap: c, at least 0: required margin of the label.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LDRKL(gap=0.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.)

    Reference: Zhu, Ying, Yang. Label Distributionally Robust Losses for Multi-class Classification: Consistency,
    Robustness and Adaptivity. ICML 2023.
    """

    option_ranges: ClassVar = {"temperature": "(0, inf)", "gap": "[0, inf)"}
    tuning_grid: ClassVar = {"temperature": (0.3, 1.0, 3.0), "gap": (0.0, 1.0)}

    def __init__(self, *, temperature: float = 1.0, gap: float = 1.0, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.temperature, self.gap = number(temperature, "temperature", above=0), number(gap, "gap", at_least=0)

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
        """Return the losses, and the mean of expm1 that gives them. The losses are precise at a large temperature."""
        a = s.detach().amax(-1, keepdim=True)  # detached: the losses do not depend on the origin
        own = (score - a) / self.temperature
        less = math.expm1(-self.gap / self.temperature)  # the term of the label has no gap
        mean = ((s - a) / self.temperature).expm1().mean(-1, keepdim=True) + less / s.shape[1] * own.exp()
        return self.gap + (a - score) + self.temperature * mean.clamp(min=HALF).log1p(), mean

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:g}, gap={self.gap:g}, {super().extra_repr()}"


class ALDRKL(ClassificationLoss):
    r"""ALDR-KL: LDR-KL with a temperature that adapts to each sample.

    .. math:: L = \lambda \log \frac1n \sum_l e^{z_l / \lambda}
        - \frac{\alpha \log n}{2 \lambda_0} (\lambda - \lambda_0)^2, \qquad
        \lambda = \lambda_0 \Bigl(1 - \frac{\mathrm{KL}(p \,\|\, \text{uniform})}{\alpha \log n}\Bigr)

    Here z_l = s_l - s_y + gap [l != y] and p = softmax(z / lambda). The second equation says that lambda maximizes the
    first expression. If there are several solutions, the largest one is used. The authors store lambda for every sample
    and do one step of a fixed-point iteration per epoch. This implementation solves for lambda in every call with
    Newton's method and stores nothing. If the scores of a sample clearly favor one class, its lambda is small, but at
    least lambda_0 (1 - 1 / alpha).

    For small alpha, the loss is not continuous: lambda jumps when two solutions merge as the scores change. Near a
    jump, single and double precision may differ. For alpha below 1.2, the solution found is not always the largest.

    For a distribution q over labels, z = s - q s + gap (1 - q), as in the authors' code. There is one lambda per row,
    and the loss is not the expectation over labels. With class weights w, the loss of a row is sum_c w_c q_c times the
    loss of the distribution proportional to w q.

    Use when:
        Labels are wrong anywhere and you cannot clean them. Clear samples get a small temperature, and doubtful samples
        get a large temperature. In the study here over four kinds of noise, this loss gained 1.2 points of top-1.

    Avoid when:
        Labels are clean, or a step must be as fast as with cross-entropy: the loss solves for a temperature per row.

    Args:
        temperature: lambda_0, the largest lambda, positive.
        alpha: above 1. The larger alpha, the less lambda adapts.
        gap: c, at least 0: required margin of the label.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> ALDRKL(gap=0.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.)

    Reference: Zhu, Ying, Yang. Label Distributionally Robust Losses for Multi-class Classification: Consistency,
    Robustness and Adaptivity. ICML 2023.
    """

    option_ranges: ClassVar = {"temperature": "(0, inf)", "alpha": "(1, inf)", "gap": "[0, inf)"}
    tuning_grid: ClassVar = {"temperature": (0.3, 1.0, 3.0), "alpha": (1.5, 3.0)}

    def __init__(
        self, *, temperature: float = 1.0, alpha: float = 2.0, gap: float = 1.0, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**common)
        self.temperature, self.gap = number(temperature, "temperature", above=0), number(gap, "gap", at_least=0)
        self.alpha = number(alpha, "alpha", above=1)

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

    def fused(self, logits: Tensor, masses: Masses) -> Tensor | None:
        """Return the losses for distributions over labels. Each is not the expectation of the losses of the labels."""
        if masses.labels is not None and masses.even is None and masses.labels.shape[1] == 1:
            return None
        s = masses.usable(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits)
        target = masses.table(s.shape[1], s.dtype)
        mass = target.sum(-1, keepdim=True)
        q = target / torch.where(mass == 0, 1.0, mass)
        x = s + self.gap * (1 - q)
        a = x.detach().amax(-1, keepdim=True)
        ahead = torch.where(q == 0, 0.0, q * (a - s)).sum(-1)
        return nan_if_invalid(mass[:, 0] * (self._above(x - a) + ahead), s)

    def _above(self, z: Tensor) -> Tensor:
        """Return the maximum [...] over lambda for z [..., n] <= 0."""
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
        """Return the largest lambda [...] by Newton steps from above, with bisection if a step passes the solution."""
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

    def extra_repr(self) -> str:
        return f"temperature={self.temperature:g}, alpha={self.alpha:g}, gap={self.gap:g}, {super().extra_repr()}"


def _log_mean_exp(u: Tensor) -> Tensor:
    """Return log mean exp [...] of u [..., n] <= 0, precise if all u are close to 0."""
    mean = u.expm1().mean(-1)
    near = mean.clamp(min=HALF).log1p()
    return torch.where(mean > HALF, near, u.logsumexp(-1) - math.log(u.shape[-1]))


def _divergence(z: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(p || uniform) [...] of p = softmax(z / lambda), its derivative in lambda, and whether it is concave."""
    u = z / lam[..., None]
    ahead = u - _log_mean_exp(u)[..., None]  # log(n p), precise near 0
    p = ahead.exp() / z.shape[-1]
    divergence = torch.where(p == 0, 0.0, p * ahead).sum(-1)
    centred = torch.where(p == 0, 0.0, ahead - divergence[..., None]).detach()
    square = p * centred**2
    variance = square.sum(-1)
    concave = 3 * variance + (square * centred).sum(-1) <= 0
    return divergence, -variance / lam, concave
