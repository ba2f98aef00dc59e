"""Cross-entropy reshaped for imbalanced classes: by difficulty (focal) and by required gaps (LDAM).

Both are functions of p_y and 1 - p_y under softmax. A gap, which the paper calls a margin, shifts the log-odds
l_y = log p_y - log(1 - p_y) of the label; cross-entropy is softplus(-l_y).
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_plugins._margins import checked_counts, relative_gaps
from topk_registry import ClassificationLoss
from topk_registry.options import integer, number
from topk_registry.rows import Curve, RowLoss, softmax_rows

LARGE = 60.0  # a gap whose exponential is still far from overflow in single precision


def _focal(log_p, log_not, p, not_p, own, numbers):
    fade = math.exp(numbers[0] * max(log_not, -1e30))  # 0 times -inf would be NaN
    # p log p is 0 where p is; 1 - p comes before the power, which has an infinite slope at p = 1 for gamma < 1
    return -log_p * fade, fade * (numbers[0] * p * max(log_p, -100.0) - not_p)


def _with_margin(log_p, log_not, p, not_p, own, numbers):
    # own: exp(scale m) - 1 of the gap m; log(1 + exp(scale m - log-odds)), without exponentials
    rest = own * not_p
    return math.log1p(rest) - log_p, -(rest + not_p) / (1.0 + rest)


def _with_large_margin(log_p, log_not, p, not_p, own, numbers):
    # own: scale m
    z = own - (log_p - log_not)
    e = math.exp(-abs(z))
    most = 1.0 / (1.0 + e)
    return max(z, 0.0) + math.log1p(e), -most if z > 0.0 else -e * most


class Focal(ClassificationLoss):
    """Cross-entropy that fades for well-classified samples.

        L(s, y) = (1 - p_y)^gamma * (-log p_y),    p = softmax(s)

    Class weights multiply the whole loss and leave p_y as it is.

    Use when:
        Easy samples outnumber hard ones by far, as background does in detection, or a network is too sure of itself.

    Avoid when:
        Labels are noisy: it looks at the hard samples, and wrong labels are the hardest. On balanced, clean classes it
        is mostly level with cross-entropy.

    Args:
        gamma: how fast it fades, at least 0. 0 is cross-entropy.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> Focal(gamma=2.0)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.0018)

    Reference:
        Lin, Goyal, Girshick, He, Dollar. Focal Loss for Dense Object Detection. ICCV 2017.
    """

    option_ranges: ClassVar = {"gamma": "[0, inf)"}
    tuning_grid: ClassVar = {"gamma": (0.5, 1.0, 2.0)}

    def __init__(
        self,
        *,
        gamma: float = 2.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.gamma = number(gamma, "gamma", at_least=0)

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        return softmax_rows(Curve(self._loss, _focal, (self.gamma,)))

    def _loss(self, log_p: Tensor, log_not: Tensor, own: None) -> Tensor:
        # a score of -inf rules its class out: times its infinite loss, the slope of 1 - p would be NaN instead of 0
        log_not = log_not.masked_fill(log_p == -torch.inf, 0.0)
        # through logs: (1 - p)^gamma alone has an infinite slope at p = 1 for gamma < 1
        return -log_p * (self.gamma * log_not).exp()

    def extra_repr(self) -> str:
        return f"gamma={self.gamma:g}, {super().extra_repr()}"


class LDAM(ClassificationLoss):
    """Cross-entropy with a required gap that grows as the label's class gets rarer, and deferred re-weighting.

        L(s, y) = CE(scale * (s - m_y onehot_y), y) = softplus(scale * m_y - l_y),
        m_c = max_margin * n_c^(-1/4) / max_j n_j^(-1/4)

    where l is the log-odds of scale * s, and m_c is the required gap, the paper's margin. From ``drw_epoch`` on, class
    c also weighs (1 - beta) / (1 - beta^n_c), normalised to a mean of 1 over classes (deferred re-weighting, DRW): the
    features are learned first, then the boundaries move towards the frequent classes. Made for cosine scores: see
    ``topk_registry.normalize_classifier``.

    Use when:
        A tail is long, training is long too, and the classifier can be a cosine one (``--normalize-classifier``).

    Avoid when:
        Epochs are few, as cosine classifiers learn slowly, or the classifier must stay a plain linear one. Try
        ``logit_adjustment`` first: it needs neither.

    Args:
        class_counts: how many training samples each class has [n].
        max_margin: the required gap of the rarest class.
        scale: factor of the scores; 1 if the classifier has a scale of its own.
        drw_epoch: the first epoch with re-weighting, a whole number, or a share of ``total_epochs`` between 0 and 1
            (the paper: 160 of 200, 0.8). None: never. Needs ``set_epoch`` to be called, as the trainer does.
        beta: the nearer to 1, the stronger the re-weighting, in [0, 1).
        total_epochs: the length of the training, where ``drw_epoch`` is a share of it.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> loss = LDAM(class_counts=[500, 50, 5], drw_epoch=0.8, total_epochs=200)
        >>> loss.set_epoch(160)
        >>> loss(torch.tensor([[0.9, 0.1, -0.3]]), torch.tensor([0]))
        tensor(4.3349e-09)

    Reference:
        Cao, Wei, Gaidon, Arechiga, Ma. Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss.
        NeurIPS 2019. Weights: Cui, Jia, Lin, Song, Belongie. Class-Balanced Loss Based on Effective Number of Samples.
    """

    option_ranges: ClassVar = {"max_margin": "[0, inf)", "scale": "(0, inf)", "beta": "[0, 1)"}
    tuning_grid: ClassVar = {"max_margin": (0.2, 0.35, 0.5)}

    _version = 2  # checkpoints of before hold the weights of the epoch that they were written in

    fixed_options: ClassVar = ("beta",)

    relative_gaps: Tensor
    balance: Tensor

    def __init__(
        self,
        *,
        class_counts: Tensor | Sequence[float] | None = None,
        max_margin: float = 0.5,
        scale: float = 30.0,
        drw_epoch: float | None = None,
        beta: float = 0.9999,
        total_epochs: int | None = None,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.max_margin, self.scale = number(max_margin, "max_margin", at_least=0), number(scale, "scale", above=0)
        self.beta = number(beta, "beta", at_least=0, below=1)
        # not in the state_dict: they are options, and a checkpoint must load whatever the counts are
        self.register_buffer("relative_gaps", relative_gaps(class_counts), persistent=False)
        assert class_counts is not None, "relative_gaps raises without it"
        self.register_buffer("balance", effective_number_weights(class_counts, beta), persistent=False)
        self.total_epochs = total_epochs
        self.drw_epoch = _first_epoch(drw_epoch, total_epochs)
        self._begin_phase(0)

    @property
    def first_change(self) -> int | None:
        return self.drw_epoch or None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0; from ``drw_epoch`` on, classes are re-weighted."""
        super().set_epoch(epoch)
        self._begin_phase(epoch)

    def _begin_phase(self, epoch: int) -> None:
        self._epoch, self.reweights = epoch, self.drw_epoch is not None and epoch >= self.drw_epoch

    def set_option(self, name: str, value: Any) -> None:
        if name in ("drw_epoch", "total_epochs") and "_epoch" in vars(self):
            given = {"drw_epoch": self.drw_epoch, "total_epochs": self.total_epochs, name: value}
            vars(self).update(given, drw_epoch=_first_epoch(**given))
            self._begin_phase(self._epoch)
        else:
            super().set_option(name, value)

    @property
    def class_weight(self) -> Tensor | None:
        """The given factors, times those of the re-weighting from its first epoch on."""
        if self.drw_epoch is None:
            return self.weight
        factor = self.balance if self.reweights else torch.ones_like(self.balance)
        return factor if self.weight is None else factor * self.weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: dict, *args: Any) -> None:
        if metadata.get("version", 1) < 2 and self.drw_epoch is not None:
            state_dict.pop(prefix + "weight", None)
            if self.weight is not None:
                state_dict[prefix + "weight"] = self.weight
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    def check_classes(self, n: int) -> None:
        if n != len(self.relative_gaps):
            raise ValueError(f"class_counts has {len(self.relative_gaps)} entries, logits have {n} classes")

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        gaps = self.scale * self.max_margin * self.relative_gaps  # of the scores times scale
        if self.scale * self.max_margin > LARGE:
            curve = Curve(self._of_gap, _with_large_margin, own=gaps)
        else:
            curve = Curve(self._of_lead, _with_margin, own=gaps.expm1())
        return softmax_rows(curve, scale=self.scale)

    def _of_gap(self, log_p: Tensor, log_not: Tensor, gap: Tensor) -> Tensor:
        return F.softplus(gap - (log_p - log_not), threshold=40.0)

    def _of_lead(self, log_p: Tensor, log_not: Tensor, lead: Tensor) -> Tensor:
        return F.softplus(lead.log1p() - (log_p - log_not), threshold=40.0)

    def extra_repr(self) -> str:
        drw = "" if self.drw_epoch is None else f"drw_epoch={self.drw_epoch}, beta={self.beta:g}, "
        return f"max_margin={self.max_margin:g}, scale={self.scale:g}, {drw}{super().extra_repr()}"


def effective_number_weights(class_counts: Tensor | Sequence[float], beta: float) -> Tensor:
    """Class weights (1 - beta) / (1 - beta^n_c) [n], normalised to a mean of 1; a class without samples weighs as the
    rarest one that has some.

    Example:
        >>> effective_number_weights([100, 10, 1], 0.9)
        tensor([0.2393, 0.3674, 2.3932], dtype=torch.float64)
    """
    beta, counts = number(beta, "beta", at_least=0, below=1), checked_counts(class_counts)
    effective = -torch.expm1(counts * math.log(beta)) if beta > 0 else torch.ones_like(counts)
    weights = 1 / effective
    return weights / weights.mean()


def _first_epoch(drw_epoch: float | None, total_epochs: int | None) -> int | None:
    if total_epochs is not None:
        total_epochs = integer(total_epochs, "total_epochs", at_least=0)
    if drw_epoch is None:
        return None
    drw_epoch = number(drw_epoch, "drw_epoch", at_least=0)
    if drw_epoch > 1 and not drw_epoch.is_integer():
        raise ValueError(f"drw_epoch must be a whole number of epochs or a share of them in (0, 1), got {drw_epoch!r}")
    if drw_epoch.is_integer():
        return int(drw_epoch)
    if total_epochs is None:
        raise ValueError(f"drw_epoch = {drw_epoch!r} is a share of total_epochs, which is missing")
    return round(drw_epoch * total_epochs)
