"""What every classification loss of this kind shares: targets, options, precision and reduction.

A loss is a table L(s, c): the loss of the scores s if the label were c. One rule covers every kind of target: a
distribution q over labels costs its expectation,

    L(s, q) = sum_c q_c w_c L(s, c),

so an index is the one-hot q, and mixup, cutmix and label smoothing are others. ``weight``, ``reduction``,
``label_smoothing`` and ``ignore_index`` mean what they mean in ``torch.nn.CrossEntropyLoss``. A subclass writes the
table, and nothing else.
"""

from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

REDUCTIONS = ("none", "mean", "sum")


class ClassificationLoss(nn.Module):
    """Base of losses over ``(logits [B, n], target [B] or [B, n])``; a subclass defines :meth:`per_class`.

    Args:
        weight: one non-negative factor a class [n].
        reduction: ``"mean"`` (weighted, as cross-entropy's), ``"sum"`` or ``"none"``.
        label_smoothing: the share of the label spread evenly over all classes, for index targets.
        ignore_index: rows with this index target cost nothing.

    Example:
        >>> class ZeroOne(ClassificationLoss):
        ...     def per_class(self, logits):
        ...         return (logits < logits.amax(-1, keepdim=True)).to(logits.dtype)
        >>> ZeroOne()(torch.eye(3), torch.tensor([0, 1, 1]))
        tensor(0.3333)
    """

    weight: Tensor | None
    reduction: str
    label_smoothing: float
    ignore_index: int

    def __init__(
        self,
        *,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing!r}")
        self.reduction = reduction
        self.label_smoothing = float(label_smoothing)
        self.ignore_index = int(ignore_index)
        self.register_buffer("weight", None if weight is None else checked_weight(weight))

    def per_class(self, logits: Tensor) -> Tensor:
        """The table L(s, c) [B, n] of scores [B, n]: what each row would cost, were its label c."""
        raise TypeError(f"{type(self).__name__} must define per_class(logits [B, n]) -> [B, n]")

    def per_label(self, logits: Tensor, label: Tensor) -> Tensor:
        """L(s, y) [B] at labels [B]; a subclass overrides it where that is cheaper than the table."""
        return self.per_class(logits).gather(1, label[:, None])[:, 0]

    def per_target(self, logits: Tensor, target: Tensor) -> Tensor:
        """sum_c q_c w_c L(s, c) [B] for distributions q [B, n]; overridden where that is cheaper than the table."""
        q = target if self.weight is None else target * self.weight.to(target)
        table = self.per_class(logits)
        # 0 * inf is NaN: a class of no mass costs nothing, but what it would cost is the gradient to its mass
        return (q * table.masked_fill((q == 0) & ~table.isfinite(), 0.0)).sum(-1)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        check_logits(logits)
        labels = check_target(logits, target, ignore_index=self.ignore_index)
        if self.weight is not None and self.weight.numel() != logits.shape[1]:
            raise ValueError(f"weight has {self.weight.numel()} entries, logits have {logits.shape[1]} classes")
        if torch.is_autocast_enabled(logits.device.type):
            with torch.autocast(logits.device.type, enabled=False):
                return self._in_full_precision(logits, target, labels)
        return self._in_full_precision(logits, target, labels)

    def _in_full_precision(self, logits: Tensor, target: Tensor, labels: tuple[int, int] | None) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if target.is_floating_point():
            return self._dense(logits, target.to(logits.dtype))
        ignored = labels is None or labels[0] <= self.ignore_index <= labels[1]  # not so, or not known without a look
        if not ignored and self.weight is None and not self.label_smoothing:
            return _reduce(self.per_label(logits, target.long()), self.reduction)  # the plain case
        return self._index(logits, target.long())

    def _dense(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.label_smoothing:
            target = torch.lerp(target, torch.full_like(target, 1 / target.shape[1]), self.label_smoothing)
        return _reduce(self.per_target(logits, target), self.reduction)

    def _index(self, logits: Tensor, target: Tensor) -> Tensor:
        def smoothed(label: Tensor) -> Tensor:
            one_hot = torch.zeros_like(logits).scatter_(1, label[:, None], 1.0)
            q = torch.lerp(one_hot, torch.full_like(one_hot, 1 / logits.shape[1]), self.label_smoothing)
            return self.per_target(logits, q)

        return label_loss(
            smoothed if self.label_smoothing else lambda label: self.per_label(logits, label),
            target,
            self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            weighted=bool(self.label_smoothing),
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, label_smoothing={self.label_smoothing:g}"


class TopKLoss(ClassificationLoss):
    """A :class:`ClassificationLoss` with the set size ``k``, 1 <= k <= n - 1."""

    k: int

    def __init__(
        self,
        k: int = 5,
        *,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise ValueError(f"k must be an integer of at least 1, got {k!r}")
        self.k = int(k)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.ndim == 2 and self.k >= logits.shape[1]:
            raise ValueError(f"k must be below the number of classes: k = {self.k}, logits have {logits.shape[1]}")
        return super().forward(logits, target)

    def extra_repr(self) -> str:
        return f"k={self.k}, {super().extra_repr()}"


def label_loss(
    cost: Callable[[Tensor], Tensor],
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    weighted: bool = False,
) -> Tensor:
    """The loss at index targets [B] from ``cost(label [B]) -> [B]``, with cross-entropy's options.

    Args:
        cost: of rows at labels; a row that is ignored is asked for label 0.
        target: int64 class indices [B], or ``ignore_index``.
        weight: one factor a class [n].
        weighted: the costs hold those factors already.
    """
    ignored = target == ignore_index
    label = torch.where(ignored, 0, target)
    loss = cost(label)
    factor = torch.ones_like(loss) if weight is None else weight.to(loss)[label]
    factor = factor.masked_fill(ignored, 0.0)
    loss = (loss if weighted else loss * factor).masked_fill(ignored, 0.0)
    return loss.sum() / factor.sum() if reduction == "mean" else _reduce(loss, reduction)


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def check_logits(logits: Tensor) -> None:
    """Raise unless logits are floating point [B, n], n >= 2."""
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [batch, classes] with at least 2 classes, "
            f"got {logits.dtype} {list(logits.shape)}"
        )


def check_target(logits: Tensor, target: Tensor, *, ignore_index: int) -> tuple[int, int] | None:
    """Raise unless target is integer [B] within range, or floating point [B, n]. Returns the least and the largest
    index, where they were looked at.

    The range is looked at on the CPU only: on a GPU it would stall the stream (an index out of range still stops at the
    gather, as in cross-entropy), and under compilation it would break the graph.
    """
    dense = target.is_floating_point()
    if dense or target.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        wanted = logits.shape if dense else logits.shape[:1]
        if target.shape == wanted:
            if not dense and target.device.type == "cpu" and not torch.compiler.is_compiling():
                return _check_range(target, logits.shape[1], ignore_index)
            return None
    raise ValueError(
        f"target must be class indices (integer, {list(logits.shape[:1])}) or a distribution "
        f"(floating point, {list(logits.shape)}), got {target.dtype} {list(target.shape)}"
    )


def _check_range(target: Tensor, n: int, ignore_index: int) -> tuple[int, int]:
    low, high = map(int, target.aminmax()) if target.numel() else (0, 0)
    if low >= 0 and high < n:
        return low, high
    target = target.long()  # an ignore_index of -100 would be compared with bytes as 156
    wrong = ((target < 0) | (target >= n)) & (target != ignore_index)
    if wrong.any():
        raise ValueError(
            f"target must be in [0, {n - 1}] (or ignore_index = {ignore_index}), got {target[wrong][0].item()}"
        )
    return min(low, ignore_index), max(high, ignore_index)


def checked_weight(weight: Tensor | Sequence[float]) -> Tensor:
    weight = torch.as_tensor(weight, dtype=torch.get_default_dtype()).detach().clone()
    if weight.ndim != 1 or not bool((weight.isfinite() & (weight >= 0)).all()):
        raise ValueError(f"weight must hold one finite, non-negative factor a class, got {weight.tolist()}")
    return weight
