"""Cross-entropy on scores that are shifted by how frequent each class is in training."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from topk_plugins._margins import checked_counts
from topk_registry import ClassificationLoss
from topk_registry.options import number
from topk_registry.rows import RowLoss, softmax_rows


class LogitAdjustment(ClassificationLoss):
    r"""Cross-entropy whose softmax knows the prior, so that the scores need not learn it.

    .. math:: L(s, y) = -\log \frac{\pi_y^\tau e^{s_y}}{\sum_j \pi_j^\tau e^{s_j}}

    with the share :math:`\pi_j` of class j in training. For tau = 1 the scores are consistent with the mean accuracy
    over classes. A class without samples counts as the rarest one that has some.

    Use when:
        Training classes are frequent and rare, and mean accuracy over classes counts; the first loss to try on a long
        tail, at the cost of cross-entropy.

    Avoid when:
        Accuracy over images counts and images in use are as unbalanced as those of training, or the classes are
        balanced already, where it is cross-entropy.

    Args:
        class_counts: how many training samples each class has [n].
        tau: how much of the prior is taken out, at least 0; 0 is cross-entropy.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> LogitAdjustment(class_counts=[3, 1])(torch.zeros(1, 2), torch.tensor([1]))
        tensor(1.3863)

    Reference: Menon, Jayasumana, Rawat, Jain, Veit, Kumar. Long-tail learning via logit adjustment. ICLR 2021,
    equation 10.
    """

    option_ranges: ClassVar = {"tau": "[0, inf)"}
    tuning_grid: ClassVar = {"tau": (0.5, 1.0, 1.5)}

    log_prior: Tensor

    def __init__(
        self,
        *,
        class_counts: Tensor | Sequence[float] | None = None,
        tau: float = 1.0,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.tau = number(tau, "tau", at_least=0)
        counts = checked_counts(class_counts)
        # an option, not a state: a checkpoint must load whatever the counts are
        self.register_buffer("log_prior", (counts / counts.sum()).log(), persistent=False)

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        prior = self.log_prior
        if prior.numel() != logits.shape[1]:
            raise ValueError(f"class_counts has {prior.numel()} entries, logits have {logits.shape[1]} classes")
        return softmax_rows(shift=prior if self.tau == 1 else self.tau * prior)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"


class BalancedSoftmax(LogitAdjustment):
    r"""Cross-entropy with each class counted as often as it was seen: ``logit_adjustment`` with tau = 1.

    .. math:: L(s, y) = -\log \frac{n_y e^{s_y}}{\sum_j n_j e^{s_j}}

    Use when:
        Training classes are frequent and rare, and mean accuracy over classes counts. It has nothing to tune.

    Avoid when:
        Images in use are as unbalanced as those of training and accuracy over images counts: it gives frequent classes
        up for rare ones.

    Args:
        class_counts: how many training samples each class has [n].
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> BalancedSoftmax(class_counts=[3, 1])(torch.zeros(1, 2), torch.tensor([1]))
        tensor(1.3863)

    Reference: Ren, Yu, Sheng, Ma, Zhao, Yi, Li. Balanced Meta-Softmax for Long-Tailed Visual Recognition. NeurIPS 2020.
    """

    tuning_grid: ClassVar = {}

    def __init__(
        self,
        *,
        class_counts: Tensor | Sequence[float] | None = None,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            class_counts=class_counts,
            weight=weight,
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
