"""Cross-entropy for imbalanced classes: focal loss, LDAM, balanced softmax and logit adjustment."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from topk_plugins._margins import positive_counts, relative_gaps
from topk_plugins._rows import without_highest
from topk_registry import ClassificationLoss, CommonOptions, SoftmaxLoss
from topk_registry.ops.backend import is_readable


class Focal(SoftmaxLoss):
    """Focal loss: cross-entropy with less weight on samples whose label already has a high probability.

        L(s, y) = (1 - p_y)^gamma * (-log p_y),    p = softmax(s)

    Here s are the n logits of one sample, y is the label, and p_y is the probability of the label. Class weights
    multiply the loss of a sample and do not change p_y.

    - Use when: Easy samples far outnumber hard samples. An example is the background in object detection.
    - Avoid when: Labels are noisy, because wrong labels are the hardest samples and get the most weight.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 74.3 and 60.4 (74.5 and 60.5), top-2 on Fashion-MNIST 94.5 and 91.4 (94.6 and
      91.6), top-3 on CIFAR-10N 92.4 and 89.1 (92.4 and 89.2). On feature vectors with a long tail of rare classes,
      ``noised_topk_imbalanced`` was 2.7 points of macro top-5 accuracy ahead of this loss. Macro accuracy is the mean
      over classes of the accuracy within each class.

    Args:
        gamma: exponent of 1 - p_y, at least 0. For gamma = 0, the loss is cross-entropy.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> Focal(gamma=2.0)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.0018)

    Reference: Lin, Goyal, Girshick, He, Dollar. Focal Loss for Dense Object Detection. ICCV 2017.
    """

    tuning_grid: ClassVar = {"gamma": (0.5, 1.0, 2.0)}

    def __init__(self, *, gamma: Annotated[float, "[0, inf)"] = 2.0, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.gamma = gamma

    def curve(self, nll: Tensor) -> Tensor:
        finite = nll.clamp(max=100.0)  # then 1 - p rounds to 1; for nll = inf, the gradient would be inf * 0
        if self.gamma == 2.0:  # a square is faster than a power
            return nll * torch.expm1(-finite).square()
        # for gamma < 1, the slope of the power at 1 - p = 0 would be infinite
        return nll * (-torch.expm1(-finite)).clamp(min=torch.finfo(nll.dtype).tiny) ** self.gamma


class LDAM(ClassificationLoss):
    """LDAM: cross-entropy with a required margin that is larger for rarer classes.

        L(s, y) = CE(scale * (s - m_y onehot_y), y),    m_c = max_margin * (min_j n_j / n_c)^(1/4)

    Here s are the n logits of one sample, y is the label, onehot_y is the one-hot vector of y, CE is cross-entropy, and
    n_c is the number of training samples of class c. The loss subtracts the margin m_y from the label's logit, so
    training must raise this logit further. A class without samples gets the count of the rarest class that has samples.

    If you pass ``drw_epoch``, the loss also weights the classes from this epoch on (deferred re-weighting, DRW). The
    weight of class c is (1 - beta) / (1 - beta^n_c), divided by the mean of these weights over the classes. Call
    ``set_epoch`` before each epoch, as ``timm train`` does.

    The loss is designed for a cosine classifier, where each logit is the cosine between the features and a weight
    vector. ``topk_registry.normalize_classifier`` and ``timm train --normalize-classifier`` build a cosine classifier.

    - Use when: There are many rare classes, training takes many epochs, and the model has a cosine classifier.
    - Avoid when: Training takes few epochs, because cosine classifiers train slowly. Try ``logit_adjustment`` first.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 75.5 and 62.2 (74.5 and 60.5), top-2 on Fashion-MNIST 94.3 and 92.0 (94.6 and
      91.6), top-3 on CIFAR-10N 92.6 and 89.7 (92.4 and 89.2). On feature vectors with a long tail of rare classes,
      macro top-5 accuracy was lower than with cross-entropy. Macro accuracy is the mean over classes of the accuracy
      within each class.

    Args:
        class_counts: number of training samples of each class [n]. ``timm train`` passes these counts.
        max_margin: required margin of the rarest class, at least 0, in units of the logits before ``scale``.
        scale: positive factor of the logits. Set 1 if the classifier already scales the logits.
        drw_epoch: first epoch with re-weighting, counted from 0. Pass an integer, or a fraction of ``total_epochs``
            between 0 and 1. The paper uses epoch 160 of 200, which is the fraction 0.8. None: no re-weighting.
        beta: strength of the re-weighting, in [0, 1). Values closer to 1 give rare classes more weight.
        total_epochs: number of training epochs. Required only if ``drw_epoch`` is a fraction.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> loss = LDAM(class_counts=[500, 50, 5], drw_epoch=0.8, total_epochs=200)
        >>> loss.set_epoch(160)
        >>> loss(torch.tensor([[0.3, 0.1, -0.3]]), torch.tensor([0]))
        tensor(0.2505)

    Reference: Cao, Wei, Gaidon, Arechiga, Ma. Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss.
    NeurIPS 2019. Weights: Cui, Jia, Lin, Song, Belongie. Class-Balanced Loss Based on Effective Number of Samples.
    """

    tuning_grid: ClassVar = {"max_margin": (0.2, 0.35, 0.5)}
    fixed_options: ClassVar = ("beta", "class_counts", "drw_epoch", "total_epochs")

    class_counts: Tensor
    relative_gaps: Tensor
    balance: Tensor

    def __init__(
        self,
        *,
        class_counts: Annotated[Tensor | Sequence[float], "[0, inf)"],
        max_margin: Annotated[float, "[0, inf)"] = 0.5,
        scale: Annotated[float, "(0, inf)"] = 30.0,
        drw_epoch: Annotated[float | None, "[0, inf)"] = None,
        beta: Annotated[float, "[0, 1)"] = 0.9999,
        total_epochs: Annotated[int | None, "[0, inf)"] = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(**common)
        self.set_option("class_counts", class_counts)
        self.max_margin = max_margin
        self.scale = scale
        self.beta = beta
        self.total_epochs = total_epochs
        first = first_epoch(self.checked_option("drw_epoch", drw_epoch), total_epochs)
        self.drw_epoch = first
        self.reweights = first == 0
        self.first_change = first or None
        # not saved in checkpoints, because a checkpoint must load for any class counts
        self.register_buffer("relative_gaps", relative_gaps(self.class_counts), persistent=False)
        self.register_buffer("balance", effective_number_weights(self.class_counts, beta), persistent=False)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.reweights = self.drw_epoch is not None and epoch >= self.drw_epoch

    @property
    def class_weight(self) -> Tensor | None:
        """Class weights [n] of the current epoch, or None if neither ``weight`` nor ``drw_epoch`` is set.

        If only ``drw_epoch`` is set, ``weight`` counts as 1 for each class. From ``drw_epoch`` on, the weight of each
        class is multiplied by the factor for deferred re-weighting.
        """
        if self.drw_epoch is None:
            return self.weight
        factor = self.balance if self.reweights else torch.ones_like(self.balance)
        return factor if self.weight is None else factor * self.weight

    def predictive_logits(self, logits: Tensor) -> Tensor:
        return self.scale * logits

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        gap = self._gaps(logits)[labels, None]
        scores = self.predictive_logits(logits)
        # in place on a CPU outside of transforms such as vmap, because the table is large
        add = Tensor.scatter_add_ if is_readable(scores) else Tensor.scatter_add
        return F.cross_entropy(add(scores, 1, labels[:, None], -gap), labels, reduction="none")

    def per_class(self, logits: Tensor) -> Tensor:
        # gap - log p + log(1 - (1 - e^-gap) p); for the class whose 1 - p could round to 0, log(1 + e^(gap - log-odds))
        gaps = self._gaps(logits)
        log_p, top, p, log_odds = without_highest(self.predictive_logits(logits))
        table = (gaps - log_p).add_(torch.addcmul(torch.ones_like(log_odds), p, torch.expm1(-gaps)).log())
        # the default threshold of softplus, 20, would cause an error of 2e-9
        return table.scatter_(1, top, F.softplus(gaps[top] - log_odds, threshold=40.0))

    def _gaps(self, logits: Tensor) -> Tensor:
        return (self.scale * self.max_margin * self.relative_gaps).to(logits)


class BalancedSoftmax(ClassificationLoss):
    """Cross-entropy with the class counts inside the softmax. The loss equals ``logit_adjustment`` with tau = 1.

        L(s, y) = -log(n_y exp(s_y) / sum_j n_j exp(s_j))

    Here s are the n logits of one sample, y is the label, and n_j is the number of training samples of class j. A class
    without samples gets the count of the rarest class that has samples. Predict with the logits s, without counts.

    - Use when: Class frequencies are uneven, and macro accuracy matters: the mean over classes of the accuracy within
      each class. This loss has no option to tune.
    - Avoid when: Accuracy over all samples matters, and new samples have the class frequencies of the training set.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 74.8 and 60.6 (74.5 and 60.5), top-2 on Fashion-MNIST 94.6 and 91.7 (94.6 and
      91.6), top-3 on CIFAR-10N 92.5 and 89.7 (92.4 and 89.2).

    Args:
        class_counts: number of training samples of each class [n]. ``timm train`` passes these counts.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> BalancedSoftmax(class_counts=[3, 1])(torch.zeros(1, 2), torch.tensor([1]))
        tensor(1.3863)

    Reference: Ren, Yu, Sheng, Ma, Zhao, Yi, Li. Balanced Meta-Softmax for Long-Tailed Visual Recognition. NeurIPS 2020.
    """

    fixed_options: ClassVar = ("class_counts",)

    class_counts: Tensor
    log_prior: Tensor
    tau: float = 1.0

    def __init__(
        self, *, class_counts: Annotated[Tensor | Sequence[float], "[0, inf)"], **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**common)
        self.set_option("class_counts", class_counts)
        counts = positive_counts(self.class_counts)
        # not saved in checkpoints, because a checkpoint must load for any class counts
        self.register_buffer("log_prior", (counts / counts.sum()).log(), persistent=False)

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._adjusted(logits), labels, reduction="none")

    def per_class(self, logits: Tensor) -> Tensor:
        return -self._adjusted(logits).log_softmax(1)

    def _adjusted(self, logits: Tensor) -> Tensor:
        return logits + (self.tau * self.log_prior).to(logits)


class LogitAdjustment(BalancedSoftmax):
    """Cross-entropy of adjusted logits: the logit of each class plus tau times the log frequency of the class.

        L(s, y) = -log(pi_y^tau exp(s_y) / sum_j pi_j^tau exp(s_j))

    Here s are the n logits of one sample, y is the label, and pi_j is the share of class j in the training set. A class
    without samples gets the share of the rarest class that has samples. Because the loss adds the log frequencies, the
    model need not learn the class frequencies. Predict with the logits s, without log frequencies. With tau = 1, the
    logits that minimize the expected loss give the highest possible macro accuracy: the mean over classes of the
    accuracy within each class.

    - Use when: Class frequencies are uneven and macro accuracy matters. If there are many rare classes (a long tail),
      try this loss first.
    - Avoid when: Accuracy over all samples matters, and new samples have the class frequencies of the training set.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 74.8 and 60.6 (74.5 and 60.5), top-2 on Fashion-MNIST 94.6 and 91.8 (94.6 and
      91.6), top-3 on CIFAR-10N 92.5 and 89.7 (92.4 and 89.2). On feature vectors with a long tail of rare classes, this
      loss was 5.9 points of macro top-5 accuracy ahead of cross-entropy.

    Args:
        class_counts: number of training samples of each class [n]. ``timm train`` passes these counts.
        tau: exponent of the class frequencies, at least 0. For tau = 0, the loss is cross-entropy.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogitAdjustment(class_counts=[3, 1])(torch.zeros(1, 2), torch.tensor([1]))
        tensor(1.3863)

    Reference: Menon, Jayasumana, Rawat, Jain, Veit, Kumar. Long-tail learning via logit adjustment. ICLR 2021, eq. 10.
    """

    tuning_grid: ClassVar = {"tau": (0.5, 1.0, 1.5)}

    def __init__(
        self,
        *,
        class_counts: Tensor | Sequence[float],
        tau: Annotated[float, "[0, inf)"] = 1.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(class_counts=class_counts, **common)
        self.tau = tau


def effective_number_weights(class_counts: Tensor, beta: float) -> Tensor:
    """Return the class weights (1 - beta) / (1 - beta^n_c) [n], divided by the mean of these weights over the classes.

    Here n_c are the ``class_counts``, and beta is in [0, 1). For beta = 0, all weights are 1.

    Example:
        >>> effective_number_weights(torch.tensor([100.0, 10.0, 1.0]).double(), 0.9)
        tensor([0.2393, 0.3674, 2.3932], dtype=torch.float64)
    """
    counts = positive_counts(class_counts)
    effective = -torch.expm1(counts * math.log(beta)) if beta > 0 else torch.ones_like(counts)
    weights = 1 / effective
    return weights / weights.mean()


def first_epoch(drw_epoch: float | None, total_epochs: int | None) -> int | None:
    """Return the first epoch with re-weighting, counted from 0. Return None if ``drw_epoch`` is None.

    An integer ``drw_epoch`` is returned unchanged. A fraction is multiplied by ``total_epochs``, and rounded.

    Raises:
        ValueError: ``drw_epoch`` is above 1 and no integer, or a fraction although ``total_epochs`` is None.
    """
    if drw_epoch is None:
        return None
    if drw_epoch > 1 and not drw_epoch.is_integer():
        raise ValueError(f"drw_epoch must be an integer or a fraction of all epochs in (0, 1), got {drw_epoch!r}")
    if drw_epoch.is_integer():
        return int(drw_epoch)
    if total_epochs is None:
        raise ValueError(f"drw_epoch = {drw_epoch!r} is a fraction of total_epochs: pass total_epochs too")
    return round(drw_epoch * total_epochs)
