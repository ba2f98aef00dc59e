"""Smooth top-k SVM and top-k likelihood.

With x = s / (k tau) and l_y the log-odds of the label being in a random k-set drawn in proportion to prod exp(x), both
losses are tau softplus(alpha / tau - l_y). In terms of the margin m_y = k tau l_y, a smooth gap between the score of
the label and the k-th best other, that is a softened hinge on alpha - m_y / k.

Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from topk_registry import LabelMixture, TopKLoss, smooth_topk_hinge, soft_hinge, topk_margins


class SmoothTopKSVM(TopKLoss):
    """Smooth top-k SVM: a hinge on the k-th best other score, smoothed by the temperature tau.

    L(s, y) = tau softplus(alpha / tau - l_y), equal to the paper's
    tau log sum_{y in S or not} exp((Delta(S, y) + sum_{j in S} s_j / k) / tau) - tau log sum_{y in S} exp(...).

    Args:
        k: size of the set that should hold the label, 1 <= k <= n - 1.
        tau: temperature, positive; towards 0 the loss becomes ``topk_svm``.
        alpha: margin, not negative: one for all classes, or one a class [n].
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Shape: logits [B, n]; target [B] int64 or a distribution [B, n].

    Example:
        >>> loss = create_loss("smooth_topk_svm", k=5, tau=0.1)
        >>> loss(torch.randn(8, 100, requires_grad=True), torch.randint(100, (8,))).backward()

    Reference: Berrada, Zisserman, Kumar 2018, equations 6 and 8.
    """

    tuning_grid: ClassVar = {"tau": (0.1, 0.3, 1.0)}

    alpha: Tensor
    takes_half = True

    def __init__(
        self,
        k: int = 5,
        *,
        tau: float = 1.0,
        alpha: float | Sequence[float] | Tensor = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k, weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        if not 0.0 < tau < float("inf"):
            raise ValueError(f"tau must be positive and finite, got {tau!r}")
        margin = torch.as_tensor(alpha, dtype=torch.get_default_dtype()).detach().clone()
        if margin.ndim > 1 or not bool(((margin >= 0) & margin.isfinite()).all()):
            raise ValueError(f"alpha must be one non-negative number, or one a class, got {alpha!r}")
        self.tau = float(tau)
        self.register_buffer("alpha", margin)

    @property
    def temperature(self) -> float:
        """The temperature k tau of the top-k marginals whose log-odds this loss trains."""
        return self.k * self.tau

    def per_label(self, logits: Tensor, label: Tensor) -> Tensor:
        return smooth_topk_hinge(logits, label, self.k, tau=self.tau, alpha=self._alpha(logits))

    def per_class(self, logits: Tensor) -> Tensor:
        margins = topk_margins(logits, self.k, temperature=self.temperature)
        return soft_hinge(self._alpha(logits) - margins / self.k, self.tau)

    def per_target(self, logits: Tensor, target: Tensor) -> Tensor:
        alpha, weight = self._alpha(logits), self.weight
        return smooth_topk_hinge(logits, target, self.k, tau=self.tau, alpha=alpha, weight=weight)

    def _definition(self, logits: Tensor, target: Tensor, labels: tuple[int, int] | None) -> Tensor:
        if type(logits) is not Tensor and hasattr(logits, "placements"):  # a DTensor: row by row where its rows lie
            return super()._definition(logits, target, labels)

        def loss(target: Tensor | LabelMixture, weight: Tensor | None, reduction: str) -> Tensor:
            alpha = self._alpha(logits)
            options = {"tau": self.tau, "alpha": alpha, "weight": weight, "reduction": reduction}
            return smooth_topk_hinge(logits, target, self.k, **options)

        if target.is_floating_point():
            if self.label_smoothing:
                target = torch.lerp(target, torch.full_like(target, 1 / target.shape[1]), self.label_smoothing)
            return loss(target, self.weight, self.reduction)
        target = target.long()
        ignored = labels is None or labels[0] <= self.ignore_index <= labels[1]  # not so, or not known without a look
        if not len(logits) or (not ignored and not self.label_smoothing):
            return loss(target, self.weight, self.reduction)
        kept = target != self.ignore_index
        label, share = torch.where(kept, target, 0), kept.to(torch.promote_types(logits.dtype, torch.float32))
        if self.reduction == "mean":  # as in cross-entropy, over the weights of the labels that are not ignored
            share = share / (share if self.weight is None else share * self.weight.to(share)[label]).sum()
        mixture = LabelMixture.smoothed(label, self.label_smoothing).scaled(share)
        return loss(mixture, self.weight, "none" if self.reduction == "none" else "sum")

    def _alpha(self, logits: Tensor) -> Tensor:
        if self.alpha.ndim and self.alpha.numel() != logits.shape[1]:
            raise ValueError(f"alpha has {self.alpha.numel()} entries, logits have {logits.shape[1]} classes")
        return self.alpha.to(logits.device, torch.promote_types(logits.dtype, torch.float32))

    def extra_repr(self) -> str:
        alpha = f"{self.alpha.item():g}" if self.alpha.ndim == 0 else f"[{self.alpha.numel()}]"
        return f"tau={self.tau:g}, alpha={alpha}, {super().extra_repr()}"


class TopKNLL(SmoothTopKSVM):
    """Negative log-likelihood of the label being in the top-k set: -tau log pi_y, ``smooth_topk_svm`` without a margin.

    For k = 1 and tau = 1 it is cross-entropy. Options as :class:`SmoothTopKSVM` less ``alpha``.

    Example:
        >>> create_loss("topk_nll", k=1)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(1.3863)
    """

    tuning_grid: ClassVar = {"tau": (0.1, 0.3, 1.0)}

    def __init__(
        self,
        k: int = 5,
        *,
        tau: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            k,
            tau=tau,
            alpha=0.0,
            weight=weight,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
