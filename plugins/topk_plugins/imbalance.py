"""Cross-entropy for imbalanced classes: focal loss, margins per class (LDAM), and class frequencies in the logits."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from topk_plugins._margins import checked_counts, relative_gaps
from topk_plugins._rows import one_minus_p, softmax_log_odds
from topk_registry import ClassificationLoss, CommonOptions, SoftmaxLoss
from topk_registry.options import integer, number


class Focal(SoftmaxLoss):
    """Focal loss: cross-entropy with less weight on well-classified samples.

        L(s, y) = (1 - p_y)^gamma * (-log p_y),    p = softmax(s)

    Class weights multiply the whole loss and do not change p_y.

    Use when:
        Easy samples far outnumber hard ones, such as background in detection.

    Avoid when:
        Labels are noisy, because wrong labels are the hardest samples. In a study here on feature vectors with a long
        tail, ``noised_topk_imbalanced`` is 2.7 points of macro top-5 ahead of this loss.

    Args:
        gamma: exponent of 1 - p_y, at least 0; 0 is cross-entropy.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> Focal(gamma=2.0)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.0018)

    Reference: Lin, Goyal, Girshick, He, Dollar. Focal Loss for Dense Object Detection. ICCV 2017.
    """

    option_ranges: ClassVar = {"gamma": "[0, inf)"}
    tuning_grid: ClassVar = {"gamma": (0.5, 1.0, 2.0)}

    def __init__(self, *, gamma: float = 2.0, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.gamma = number(gamma, "gamma", at_least=0)

    def curve(self, nll: Tensor) -> Tensor:
        if self.gamma == 2.0:  # a square costs less than a power
            return nll * torch.expm1(-nll).square()
        # clamped: for gamma < 1 the power has an infinite slope at p = 1
        return nll * one_minus_p(nll) ** self.gamma

    def extra_repr(self) -> str:
        return f"gamma={self.gamma:g}, {super().extra_repr()}"


class LDAM(ClassificationLoss):
    """LDAM: cross-entropy with a required margin that is larger for rarer classes, and deferred re-weighting.

        L(s, y) = CE(scale * (s - m_y onehot_y), y),    m_c = max_margin * n_c^(-1/4) / max_j n_j^(-1/4)

    n_c is the number of training samples of class c. From ``drw_epoch`` on, class c has the additional weight (1 -
    beta) / (1 - beta^n_c), normalized to a mean of 1 over classes (deferred re-weighting, DRW). The loss is designed
    for cosine scores: see ``topk_registry.normalize_classifier``.

    Use when:
        Class frequencies have a long tail, training is long, and the classifier is a cosine classifier
        (``--normalize-classifier``).

    Avoid when:
        Epochs are few, because cosine classifiers train slowly. Try ``logit_adjustment`` first: in the study here on
        feature vectors with a long tail, ``ldam`` has lower accuracy than cross-entropy.

    Args:
        class_counts: number of training samples of each class [n].
        max_margin: required margin of the rarest class.
        scale: factor of the scores. Set 1 if the classifier already scales its scores.
        drw_epoch: first epoch with re-weighting: a whole number, or a share of ``total_epochs`` between 0 and 1 (in the
            paper 160 of 200, which is 0.8). None: never. Call ``set_epoch`` before each epoch, as ``timm train`` does.
        beta: strength of the re-weighting, in [0, 1). Values closer to 1 re-weight more.
        total_epochs: number of training epochs, required if ``drw_epoch`` is a share.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> loss = LDAM(class_counts=[500, 50, 5], drw_epoch=0.8, total_epochs=200)
        >>> loss.set_epoch(160)
        >>> loss(torch.tensor([[0.3, 0.1, -0.3]]), torch.tensor([0]))
        tensor(0.2505)

    Reference: Cao, Wei, Gaidon, Arechiga, Ma. Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss.
    NeurIPS 2019. Weights: Cui, Jia, Lin, Song, Belongie. Class-Balanced Loss Based on Effective Number of Samples.
    """

    option_ranges: ClassVar = {"max_margin": "[0, inf)", "scale": "(0, inf)", "beta": "[0, 1)"}
    tuning_grid: ClassVar = {"max_margin": (0.2, 0.35, 0.5)}
    fixed_options: ClassVar = ("beta", "class_counts", "drw_epoch", "total_epochs")

    relative_gaps: Tensor
    balance: Tensor
    beta: float
    drw_epoch: int | None
    total_epochs: int | None

    def __init__(
        self,
        *,
        class_counts: Tensor | Sequence[float] | None = None,
        max_margin: float = 0.5,
        scale: float = 30.0,
        drw_epoch: float | None = None,
        beta: float = 0.9999,
        total_epochs: int | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**common)
        self.max_margin, self.scale = number(max_margin, "max_margin", at_least=0), number(scale, "scale", above=0)
        vars(self)["beta"] = number(beta, "beta", at_least=0, below=1)
        # not saved: a checkpoint must load for any class counts
        self.register_buffer("relative_gaps", relative_gaps(class_counts), persistent=False)
        assert class_counts is not None, "relative_gaps raises without it"
        self.register_buffer("balance", effective_number_weights(class_counts, beta), persistent=False)
        vars(self).update(total_epochs=total_epochs, drw_epoch=first_epoch(drw_epoch, total_epochs))
        self.reweights = self.drw_epoch == 0

    @property
    def first_change(self) -> int | None:
        return self.drw_epoch or None

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.reweights = self.drw_epoch is not None and epoch >= self.drw_epoch

    @property
    def class_weight(self) -> Tensor | None:
        """Class weights. From ``drw_epoch`` on, these are multiplied by the weights of the re-weighting."""
        if self.drw_epoch is None:
            return self.weight
        factor = self.balance if self.reweights else torch.ones_like(self.balance)
        return factor if self.weight is None else factor * self.weight

    def check_classes(self, n: int) -> None:
        if n != len(self.relative_gaps):
            raise ValueError(f"class_counts has {len(self.relative_gaps)} entries, logits have {n} classes")

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        gap = self._gaps(logits)[labels, None]
        return F.cross_entropy((self.scale * logits).scatter_add(1, labels[:, None], -gap), labels, reduction="none")

    def per_class(self, logits: Tensor) -> Tensor:
        # log(1 + e^(gap - l)) for log-odds l; the default threshold of 20 would cause an error of 2e-9
        return F.softplus(self._gaps(logits) - softmax_log_odds(self.scale * logits), threshold=40.0)

    def _gaps(self, logits: Tensor) -> Tensor:
        return (self.scale * self.max_margin * self.relative_gaps).to(logits)

    def extra_repr(self) -> str:
        drw = "" if self.drw_epoch is None else f"drw_epoch={self.drw_epoch}, beta={self.beta:g}, "
        return f"max_margin={self.max_margin:g}, scale={self.scale:g}, {drw}{super().extra_repr()}"


class BalancedSoftmax(ClassificationLoss):
    r"""Cross-entropy with class counts inside the softmax: ``logit_adjustment`` with tau = 1.

    .. math:: L(s, y) = -\log \frac{n_y e^{s_y}}{\sum_j n_j e^{s_j}}

    Use when:
        Class frequencies are uneven and macro accuracy matters. This loss has no option to tune.

    Avoid when:
        Accuracy over images matters, and new images have the class frequencies of the training set.

    Args:
        class_counts: number of training samples of each class [n].
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> BalancedSoftmax(class_counts=[3, 1])(torch.zeros(1, 2), torch.tensor([1]))
        tensor(1.3863)

    Reference: Ren, Yu, Sheng, Ma, Zhao, Yi, Li. Balanced Meta-Softmax for Long-Tailed Visual Recognition. NeurIPS 2020.
    """

    fixed_options: ClassVar = ("class_counts",)

    log_prior: Tensor
    tau: float = 1.0

    def __init__(
        self, *, class_counts: Tensor | Sequence[float] | None = None, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**common)
        counts = checked_counts(class_counts)
        # an option, not state: a checkpoint must load whatever the counts are
        self.register_buffer("log_prior", (counts / counts.sum()).log(), persistent=False)

    def check_classes(self, n: int) -> None:
        if n != len(self.log_prior):
            raise ValueError(f"class_counts has {len(self.log_prior)} entries, logits have {n} classes")

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._adjusted(logits), labels, reduction="none")

    def per_class(self, logits: Tensor) -> Tensor:
        return -self._adjusted(logits).log_softmax(1)

    def _adjusted(self, logits: Tensor) -> Tensor:
        return logits + (self.tau * self.log_prior).to(logits)


class LogitAdjustment(BalancedSoftmax):
    r"""Cross-entropy with the log class frequencies added to the scores, so that the scores need not learn them.

    .. math:: L(s, y) = -\log \frac{\pi_y^\tau e^{s_y}}{\sum_j \pi_j^\tau e^{s_j}}

    :math:`\pi_j` is the share of class j in the training set. For tau = 1, the loss is consistent with mean accuracy
    over classes. A class without samples gets the share of the rarest class that has samples.

    Use when:
        Class frequencies are uneven and macro accuracy matters. Try this loss first on a long tail. In the study here
        on feature vectors, this loss is 5.9 points of macro top-5 ahead of cross-entropy.

    Avoid when:
        Accuracy over images matters, and new images have the class frequencies of the training set.

    Args:
        class_counts: number of training samples of each class [n].
        tau: exponent of the frequencies, at least 0. At 0 the loss is cross-entropy.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogitAdjustment(class_counts=[3, 1])(torch.zeros(1, 2), torch.tensor([1]))
        tensor(1.3863)

    Reference: Menon, Jayasumana, Rawat, Jain, Veit, Kumar. Long-tail learning via logit adjustment. ICLR 2021, equation
    10.
    """

    option_ranges: ClassVar = {"tau": "[0, inf)"}
    tuning_grid: ClassVar = {"tau": (0.5, 1.0, 1.5)}

    def __init__(
        self,
        *,
        class_counts: Tensor | Sequence[float] | None = None,
        tau: float = 1.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(class_counts=class_counts, **common)
        self.tau = number(tau, "tau", at_least=0)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"


def effective_number_weights(class_counts: Tensor | Sequence[float], beta: float) -> Tensor:
    """Return class weights (1 - beta) / (1 - beta^n_c) [n], normalized to a mean of 1.

    Example:
        >>> effective_number_weights([100, 10, 1], 0.9)
        tensor([0.2393, 0.3674, 2.3932], dtype=torch.float64)
    """
    beta, counts = number(beta, "beta", at_least=0, below=1), checked_counts(class_counts)
    effective = -torch.expm1(counts * math.log(beta)) if beta > 0 else torch.ones_like(counts)
    weights = 1 / effective
    return weights / weights.mean()


def first_epoch(drw_epoch: Any, total_epochs: int | None) -> int | None:
    """Return the first epoch with re-weighting. ``drw_epoch`` is an epoch number or a share of all epochs."""
    if total_epochs is not None:
        total_epochs = integer(total_epochs, "total_epochs", at_least=0)
    if drw_epoch is None:
        return None
    drw_epoch = number(drw_epoch, "drw_epoch", at_least=0)
    if drw_epoch > 1 and not drw_epoch.is_integer():
        raise ValueError(f"drw_epoch must be an epoch number or a share of all epochs in (0, 1), got {drw_epoch!r}")
    if drw_epoch.is_integer():
        return int(drw_epoch)
    if total_epochs is None:
        raise ValueError(f"drw_epoch = {drw_epoch!r} is a share of total_epochs: pass total_epochs too")
    return round(drw_epoch * total_epochs)
