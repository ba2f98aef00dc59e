"""Smooth top-k SVM and top-k likelihood.

Let x = s / (k tau), and let l_y be the log-odds that the label is in a random set of k classes with probability
proportional to prod exp(x). Both losses are tau softplus(alpha / tau - l_y). The margin m_y = k tau l_y is a smooth gap
between the score of the label and the k-th best other score. So both losses are a softened hinge on alpha - m_y / k.

For several k, the loss is the mean of such losses, or one likelihood -tau log sum_j P_j sigmoid(l_y^(j) - alpha / tau)
in which all k share one x. This likelihood is the loss of Petersen et al. with these marginals.

References: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018. Petersen,
Kuehne, Borgelt, Deussen, *Differentiable Top-k Classification Learning*, ICML 2022.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from topk_plugins._margins import checked_gaps
from topk_plugins._sizes import SeveralSizes, mixture_nll
from topk_registry import LabelMixture
from topk_registry.functional import linear_smooth_topk, smooth_topk, soft_hinge, topk_margins
from topk_registry.losses.targets import Masses
from topk_registry.options import choice, number


class SmoothTopKSVM(SeveralSizes):
    r"""Smooth top-k SVM: a hinge on the k-th best other score, smoothed by the temperature tau.

    .. math:: L(s, y) = \tau \log\Bigl(1 + \exp\bigl(\tfrac{\alpha}{\tau} - l_y\bigr)\Bigr), \qquad
        l_y = \log \frac{\pi_y}{1 - \pi_y}

    :math:`\pi_y` is the probability that the label is in a random set S of k classes with probability proportional to
    :math:`\exp \sum_{j \in S} x_j`, where :math:`x = s / (k \tau)`. This loss equals the paper's loss over all sets of
    k classes,

    .. math:: \tau \log \sum_{|S| = k} \exp \frac{\alpha [y \notin S] + \frac1k \sum_{j \in S} s_j}{\tau}
        - \tau \log \sum_{|S| = k,\; S \ni y} \exp \frac{\frac1k \sum_{j \in S} s_j}{\tau}

    Use when:
        You show k answers, and labels are wrong within groups of similar classes or images are few. The gradient
        vanishes once the label is in the top k by the required margin.

    Avoid when:
        You show one answer, because the loss does not train the order of the k best classes. If macro accuracy on a
        long tail matters, use ``logit_adjustment``.

    Args:
        k: size of the set that should contain the label, 1 <= k <= n - 1, or several sizes.
        tau: temperature, positive. As tau goes to 0, the loss becomes ``topk_svm``. The paper uses 0.1 on ImageNet and
            1 on CIFAR-100.
        alpha: required margin, at least 0: one number, or one per class [n]. The gradient vanishes once the score of
            the label exceeds the k-th best other score by more than k alpha.
        k_weights: weight of each k. The weights are divided by their sum. None: equal weights.
        combine: how several k become one loss. ``"mean"`` is the weighted mean of the losses of each k.
            ``"likelihood"`` is -tau log sum_j P_j exp(-L_j / tau_j) with one temperature max(k) tau for all k.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Shape: logits [B, n]; target [B] int64, a distribution [B, n] or a :class:`LabelMixture`.

    Example:
        >>> loss = create_loss("smooth_topk_svm", k=5)
        >>> loss(torch.randn(8, 100, requires_grad=True), torch.randint(100, (8,))).backward()
        >>> create_loss("smooth_topk_svm", k=[1, 5], k_weights=[0.25, 0.75])
        SmoothTopKSVM(tau=0.1, alpha=1, k=[1, 5], k_weights=[0.25, 0.75], combine='mean', reduction='mean', ...)

    Reference: Berrada, Zisserman, Kumar 2018, equations 6 and 8; Petersen, Kuehne, Borgelt, Deussen 2022.
    """

    option_ranges: ClassVar = {"tau": "(0, inf)", "alpha": "[0, inf)", "combine": ("mean", "likelihood")}
    tuning_grid: ClassVar = {"tau": (0.1, 0.3, 1.0)}

    alpha: Tensor

    def __init__(
        self,
        k: int | Sequence[int] = 5,
        *,
        tau: float = 0.1,
        alpha: float | Sequence[float] | Tensor = 1.0,
        k_weights: Sequence[float] | None = None,
        combine: str = "mean",
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k,
            k_weights,
            weight=weight,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
        self.combine = choice(combine, "combine", ("mean", "likelihood"))
        self.tau = number(tau, "tau", above=0)
        self.register_buffer("alpha", checked_gaps(alpha))

    @property
    def temperature(self) -> float:
        """Temperature k tau of the top-k marginals. With several k, the temperature is max(k) tau."""
        return self.k * self.tau

    def of_linear(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | LabelMixture, **spread: Any
    ) -> Tensor:
        """Return the loss of ``F.linear(features, weight, bias)``, computed for one chunk of classes at a time.

        Args:
            features, weight, bias, target: as in ``linear_smooth_topk``; ``weight`` may be the classes of this rank
                only.
            spread: further options of that function, such as ``process_group``, ``num_classes`` and ``sample``.
        """
        if not self._is_linear:
            raise ValueError("combine='likelihood' needs all scores at once: with a linear layer, set combine='mean'")

        def loss(k: int) -> Tensor:
            return linear_smooth_topk(
                features, weight, bias, target, k=k, tau=self.tau, alpha=self.alpha, class_weight=self.weight,
                reduction=self.reduction, label_smoothing=self.label_smoothing, ignore_index=self.ignore_index,
                **spread,
            )  # fmt: skip

        if len(self.sizes) == 1:
            return loss(self.k)
        return torch.stack([share * loss(k) for k, share in zip(self.sizes, self.shares, strict=True)]).sum(0)

    @property
    def _is_linear(self) -> bool:
        return len(self.sizes) == 1 or self.combine == "mean"

    def fused(self, logits: Tensor, masses: Masses) -> Tensor | None:
        """Return the losses of the rows [B] from the operator; None for a likelihood of several k."""
        if not self._is_linear:
            return None
        alpha, sums = self._checked_alpha(logits), self.reduction != "none" and logits.shape[0] > 0
        if len(self.sizes) == 1:
            return smooth_topk(logits, masses, k=self.k, tau=self.tau, alpha=alpha, sums=sums)
        losses = [
            share * smooth_topk(logits, masses, k=k, tau=self.tau, alpha=alpha, sums=sums)
            for k, share in zip(self.sizes, self.shares, strict=True)
        ]
        return torch.stack(losses).sum(0)

    def per_class(self, logits: Tensor) -> Tensor:
        alpha = self._checked_alpha(logits).to(logits.device, torch.promote_types(logits.dtype, torch.float32))
        if self._is_linear:
            tables = [
                share * _table(logits, k, self.tau, alpha) for k, share in zip(self.sizes, self.shares, strict=True)
            ]
            return torch.stack(tables).sum(0)
        # tau_k = max(k) tau / k gives all k the same temperature; alpha / tau, the shift of the log-odds, is unchanged
        scales = [(k, self.k / k) for k in self.sizes]
        tables = [_table(logits, k, f * self.tau, f * alpha) / (f * self.tau) for k, f in scales]
        return self.tau * mixture_nll(torch.stack(tables), self.shares)

    def _checked_alpha(self, logits: Tensor) -> Tensor:
        alpha = self.alpha
        if alpha.ndim and alpha.numel() != logits.shape[1]:
            raise ValueError(f"alpha has {alpha.numel()} entries, logits have {logits.shape[1]} classes")
        return alpha

    def extra_repr(self) -> str:
        alpha = f"{self.alpha.item():g}" if self.alpha.ndim == 0 else f"[{self.alpha.numel()}]"
        sizes = f"k={self._shown}"
        if len(self.sizes) > 1:
            sizes += f", k_weights={list(self.shares)}, combine={self.combine!r}"
        return f"tau={self.tau:g}, alpha={alpha}, {super().extra_repr().replace(f'k={self.k}', sizes, 1)}"


def _table(logits: Tensor, k: int, tau: float, alpha: Tensor) -> Tensor:
    """Return tau softplus(alpha / tau - l) for each possible label [B, n]. The temperature of l is k tau."""
    return soft_hinge(alpha - topk_margins(logits, k, temperature=k * tau) / k, tau)


class TopKNLL(SmoothTopKSVM):
    r"""Negative log-likelihood that the label is in a random set of k classes: ``smooth_topk_svm`` at alpha = 0.

    .. math:: L(s, y) = -\tau \log \pi_y, \qquad x = s / (k \tau)

    ``TopKHead.of_loss(loss)``, which is ``TopKHead(k, temperature=k * tau)``, computes the same marginals :math:`\pi`.
    For k = 1 and tau = 1, the loss is cross-entropy. The options are the options of :class:`SmoothTopKSVM` without
    ``alpha``. For several k with ``combine="likelihood"``, the loss is -tau log sum_j P_j pi_y^(j).

    Use when:
        You show k answers with their marginals, because the loss is the likelihood under these marginals. No study here
        finds a difference in accuracy from ``smooth_topk_svm``.

    Avoid when:
        You show one answer, or labels are noisy, because the gradient does not vanish for labels in the top k. With
        ``smooth_topk_svm``, the gradient vanishes.

    Example:
        >>> create_loss("topk_nll", k=1)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(1.3863)
        >>> create_loss("topk_nll", k=[1, 3], combine="likelihood")(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.6931)
    """

    tuning_grid: ClassVar = {"tau": (0.1, 0.3, 1.0)}

    def __init__(
        self,
        k: int | Sequence[int] = 5,
        *,
        tau: float = 1.0,
        k_weights: Sequence[float] | None = None,
        combine: str = "mean",
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k,
            tau=tau,
            alpha=0.0,
            k_weights=k_weights,
            combine=combine,
            weight=weight,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
