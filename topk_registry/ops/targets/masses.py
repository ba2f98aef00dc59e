"""One normaliser of targets: with the options of cross-entropy, any target is masses on labels and a mean's divisor.

A loss of a target is sum_c q_c w_c L(s, c), with masses q and class weights w. Class indices, label smoothing, mixup
and distributions differ in q alone. Two rules come from ``torch.nn.CrossEntropyLoss``. A row with the ignored index
costs nothing and does not count. A mean over class indices divides by the sum of the labels' weights, any other mean
by the number of rows.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.distributed import beside, whole
from topk_registry.ops.targets.label_mixture import LabelMixture, widest
from topk_registry.ops.values import choice


class Reduction(IntEnum):
    """How the losses of the rows become the loss of a batch; kernels are given the number."""

    NONE = 0
    MEAN = 1
    SUM = 2

    @classmethod
    def of(cls, name: str) -> "Reduction":
        """The reduction of this name; raises where there is none."""
        return BY_NAME[choice(name, "reduction", REDUCTIONS)]


NO_LABEL = -1 << 63  # ignore_index where no label is ignored
BY_NAME = {one.name.lower(): one for one in Reduction}
REDUCTIONS = tuple(BY_NAME)


class Options(NamedTuple):
    """Target, class weights, smoothing and reduction of one call of a kernel."""

    target: Tensor | LabelMixture
    weight: Tensor | None
    label_smoothing: float  # 0 with a LabelMixture, which holds it
    ignore_index: int
    reduction: Reduction


class Masses(NamedTuple):
    """The masses of a target on the classes, without class weights.

    Example:
        >>> masses = Masses.of(torch.tensor([1, -100]), 2, smoothing=0.5, ignore_index=-100)
        >>> masses.dense(2)
        tensor([[0.2500, 0.7500],
                [0.7500, 0.2500]])
        >>> masses.reduced(torch.tensor([3.0, 5.0]), "mean")
        tensor(3.)
    """

    target: Tensor | LabelMixture  # int64 labels [B]; masses [B, n]; or a mixture of labels
    ignored: Tensor | None = None  # [B], rows that cost nothing; their label is 0 here. None for none
    counts: Tensor | None = None  # [B], how much a row counts in a mean; None: one each

    @classmethod
    def of(
        cls,
        target: Tensor | LabelMixture,
        n: int,
        *,
        weight: Tensor | None = None,
        smoothing: float = 0.0,
        ignore_index: int | None = -100,
        seen: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "Masses":
        """Normalise a target of n classes.

        Args:
            target: class indices [B], masses [B, n] or a :class:`LabelMixture`, checked.
            weight: a factor a class [n], by which class indices count in a mean.
            smoothing: the share of the target that is spread evenly over all classes.
            ignore_index: rows with this index cost nothing; None: no row is ignored.
            seen: the least and the largest index, where they are known, see :func:`check_target`.
            dtype: the least precision of masses [B, n], that of the scores; half precision counts as single.
        """
        if isinstance(target, LabelMixture):
            return cls(target.smooth(smoothing))
        if target.is_floating_point():
            target = target.to(torch.promote_types(torch.promote_types(target.dtype, dtype), torch.float32))
            return cls(torch.lerp(target, torch.full_like(target, 1 / n), smoothing) if smoothing else target)
        label, ignored, counts = (whole(target) if smoothing else target).long(), None, None
        if ignore_index is not None and (seen is None or seen[0] <= ignore_index <= seen[1]):
            ignored = label == ignore_index
            label = label.masked_fill(ignored, 0)
        if weight is not None:
            counts = weight.to(label.device)[whole(label)].to(widest(label))
        if ignored is not None:
            counts = (~ignored).to(widest(label)) if counts is None else counts.masked_fill(whole(ignored), 0.0)
        masses = cls(label, ignored, counts)
        return masses._replace(target=LabelMixture.smoothed(label, smoothing)) if smoothing else masses

    @property
    def labels(self) -> Tensor | None:
        """The labels [B] where every row has one with all mass, else None."""
        target = self.target
        return None if isinstance(target, LabelMixture) or target.is_floating_point() else target

    def dense(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """The masses as a tensor [B, n]."""
        if (label := self.labels) is not None:
            return Masses(LabelMixture.smoothed(label, 0.0), self.ignored).dense(n, dtype)
        if isinstance(self.target, LabelMixture):
            return self.target.dense(n, dtype)
        return self.target if dtype is None else self.target.to(dtype)

    def weighted(self, loss: Tensor) -> Tensor:
        """Multiply the losses [B] of labels by their class weights."""
        return loss if self.counts is None else loss * self.counts.to(loss)

    def counted(self, scores: Tensor) -> Tensor:
        """The scores [B, n], or features [B, d], with zeros in ignored rows: whatever these hold, they get no gradient,
        and spoil no sum."""
        return scores if self.ignored is None else scores.masked_fill(beside(self.ignored, scores)[:, None], 0.0)

    def reduced(self, loss: Tensor, reduction: str) -> Tensor:
        """Reduce the losses of rows [B], class weights included, as cross-entropy does."""
        if self.ignored is not None:
            loss = loss.masked_fill(self.ignored, 0.0)
        if reduction == "none":
            return loss
        if reduction == "sum":
            return loss.sum()
        return loss.mean() if self.counts is None else loss.sum() / self.counts.sum().to(loss)

    def folded(self, reduction: str) -> tuple[Tensor | LabelMixture, float]:
        """Return a target and a factor: the factor times the sum of the target's losses is the loss as reduced.

        Ignored rows have no mass in it, and the weights that a mean of class indices divides by are in its masses.
        DTensors are gathered.
        """
        target, mean = self.target, reduction == "mean"
        if self.ignored is None and not (mean and self.counts is not None):
            rows = len(target.labels if isinstance(target, LabelMixture) else target)
            return target, 1.0 if not mean else 1 / rows if rows else torch.nan
        if not isinstance(target, LabelMixture):
            target = LabelMixture.smoothed(whole(target), 0.0)
        if self.ignored is not None:
            target = target.scaled((~whole(self.ignored)).to(target.shares))
        if mean and self.counts is not None:
            target = target.scaled(1 / whole(self.counts).sum().to(target.shares))
        return target, 1.0
