"""Base classes of classification losses: targets, options, precision and reduction.

A loss is a table L(s, c): the loss of the scores s if the label were c. One rule covers every kind of target: a
distribution q over labels costs its expectation,

    L(s, q) = sum_c q_c w_c L(s, c),

so an index is the one-hot q, and mixup, cutmix and label smoothing are others. A LabelMixture holds a distribution with
mass on a few labels and the same on all other classes; it is never written out. ``weight``, ``reduction``,
``label_smoothing`` and ``ignore_index`` mean what they mean in ``torch.nn.CrossEntropyLoss``. A subclass writes the
table and nothing else, or names a fused operator that computes it.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from topk_registry.losses.options import Adjustable, index
from topk_registry.ops.constant import constant_result
from topk_registry.ops.rows.api import RowLoss
from topk_registry.ops.targets.checks import check_logits, check_target, check_tensor, checked_weight
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import REDUCTIONS, Masses, Reduction
from topk_registry.ops.targets.table import expected
from topk_registry.ops.tensors import PLAIN, is_hidden, readable
from topk_registry.ops.values import integer, number

__all__ = ["ClassificationLoss", "TopKLoss"]


class ClassificationLoss(Adjustable):
    """Base of losses over ``(logits [B, n], target [B] or [B, n])``; a subclass defines :meth:`per_class`, or
    :meth:`row_loss` for one of the fused operators.

    Logits may have further dimensions, [B, n, d1, ...], with targets [B, d1, ...] or [B, n, d1, ...], or none, [n] with
    a target [] or [n], as in cross-entropy. The target of logits [B, n] may be a :class:`LabelMixture` too; its rows
    without mass are ignored, and a mean counts them.

    Options can be set afterwards (``loss.tau = 0.3``): they are checked as the constructor's are, and those that are
    read by the constructor alone are refused. Numbers and class weights are kept in double precision, whatever the
    precision of the logits.

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

    option_ranges: ClassVar[Mapping[str, Any]] = {"reduction": REDUCTIONS, "label_smoothing": "[0, 1]"}
    takes_half: bool = False  # whether the methods below take logits in half precision, or get float32 made of them
    _told = False  # of an epoch, by set_epoch
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
        Reduction.of(reduction)
        self.reduction = reduction
        self.label_smoothing = number(label_smoothing, "label_smoothing", at_least=0, at_most=1)
        self.ignore_index = index(ignore_index)
        self.register_buffer("weight", None if weight is None else checked_weight(weight))

    @property
    def first_change(self) -> int | None:
        """The first epoch whose loss is not that of epoch 0; None, as here, of a loss without a schedule."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0, before it begins. A loss with a schedule overrides this and calls it, too."""
        self._told = True

    def checked_option(self, name: str, value: Any) -> Any:
        """See :meth:`Adjustable.checked_option`."""
        if name == "ignore_index":
            return index(value)
        value = super().checked_option(name, value)
        return checked_weight(value) if name == "weight" and value is not None else value

    @property
    def class_weight(self) -> Tensor | None:
        """The factors of the classes [n] that are in force; a subclass may make them depend on the epoch."""
        return self.weight

    def check_classes(self, n: int) -> None:
        """Raise where the loss's options do not suit n classes."""

    def row_loss(self, logits: Tensor) -> RowLoss | None:
        """The loss as one of the fused operators, see :func:`topk_registry.rows.row_losses`; None where it is none."""
        return None

    def per_class(self, logits: Tensor) -> Tensor:
        """The table L(s, c) [B, n] of scores [B, n]: what each row would cost, were its label c."""
        rows = self.row_loss(logits)
        if rows is None:
            raise TypeError(f"{type(self).__name__} must define per_class(logits [B, n]) -> [B, n]")
        return rows.definition(logits, None)

    def per_label(self, logits: Tensor, label: Tensor) -> Tensor:
        """L(s, y) [B] at labels [B]; a subclass overrides it where that is cheaper than the table."""
        rows = self.row_loss(logits)
        return (
            self.per_class(logits).gather(1, label[:, None])[:, 0] if rows is None else rows.definition(logits, label)
        )

    def per_target(self, logits: Tensor, target: Tensor) -> Tensor:
        """sum_c q_c w_c L(s, c) [B] for distributions q [B, n]; overridden where that is cheaper than the table."""
        weight = self.class_weight
        q = target if weight is None else target * weight.to(target)
        if (rows := self.row_loss(logits)) is not None:
            return rows.definition(logits, q)
        return expected(q, self.per_class(logits))

    def forward(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor:
        if not (isinstance(logits, Tensor) and isinstance(target, (Tensor, LabelMixture))):
            check_tensor(logits, "logits")
            check_tensor(target, "target")
        if logits.ndim and (n := logits.shape[min(1, logits.ndim - 1)]) > 1:
            self.check_classes(n)
        logits = _unnamed(logits)
        target = _unnamed(target) if isinstance(target, Tensor) else target
        # a compiled loss does not look: what it has been told would be a guard, and the next epoch another graph
        if self.first_change is not None and not torch.compiler.is_compiling() and not self._told:
            self._say_untold(logits)
        if isinstance(target, LabelMixture):
            check_logits(logits)
            target.check(len(logits))
        elif logits.ndim != 2 and logits.ndim > 0:
            return self._at_places(logits, target)
        return self._rows(logits, target)

    if TYPE_CHECKING:  # torch declares that a call gives anything

        def __call__(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor: ...

    def _say_untold(self, logits: Tensor) -> None:
        """Warn once where a loss with a schedule trains and has not been told the epoch."""
        if not (logits.requires_grad and torch.is_grad_enabled()):
            return
        self._told = True
        warnings.warn(
            f"{type(self).__name__} changes in epoch {self.first_change}, counted from 0, and was not told the epoch: "
            "call its set_epoch(epoch) before each epoch, or it stays as in epoch 0",
            stacklevel=2,
        )

    def _at_places(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits [B, n, d1, ...] or [n]: every place is a row."""
        classes = min(1, logits.ndim - 1)
        places = (*logits.shape[:classes], *logits.shape[classes + 1 :])
        dense = target.is_floating_point()
        if target.shape != (logits.shape if dense else places):
            raise ValueError(
                f"target must be class indices (integer, {list(places)}) or a distribution (floating point, "
                f"{list(logits.shape)}), got {target.dtype} {list(target.shape)}"
            )
        n, count = logits.shape[classes], math.prod(places)  # -1 would be ambiguous where there are no rows
        rows = logits.movedim(classes, -1).reshape(count, n)
        target = target.movedim(classes, -1).reshape(count, n) if dense else target.reshape(count)
        loss = self._rows(rows, target)
        return loss.reshape(places) if self.reduction == "none" else loss

    def _rows(self, logits: Tensor, target: Tensor | LabelMixture) -> Tensor:
        weight = self.class_weight
        if readable(logits, target, weight) and (loss := self._fused(logits, target, weight)) is not None:
            return loss
        check_logits(logits)
        if weight is not None and weight.numel() != logits.shape[1]:
            raise ValueError(f"weight has {weight.numel()} entries, logits have {logits.shape[1]} classes")
        seen = check_target(logits, target, ignore_index=self.ignore_index)
        kind = logits.device.type
        if has_autocast(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self._definition(logits, target, seen)
        return self._definition(logits, target, seen)

    def _fused(self, logits: Tensor, target: Tensor | LabelMixture, weight: Tensor | None) -> Tensor | None:
        """Return the reduced loss of one fused kernel, or None if no kernel supports the call."""
        if not self._suits_row_loss(target) or (rows := self.row_loss(logits)) is None:
            return None
        return rows.reduced(
            lambda scores: self._definition(scores, target, None),
            logits,
            target,
            weight=weight,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    @staticmethod
    def _is_hidden(t: Tensor) -> bool:
        """Whether ``torch.func.vmap`` hides the numbers of a tensor, so that no choice can depend on them."""
        return is_hidden(t)

    def _suits_row_loss(self, target: Tensor | LabelMixture) -> bool:
        """Whether :meth:`row_loss` is the loss of this target. Must not read values: that would synchronise a GPU."""
        return True

    def _definition(self, logits: Tensor, target: Tensor | LabelMixture, seen: tuple[int, int] | None) -> Tensor:
        """The loss in torch operations, in at least single precision; ``seen`` is the range of indices, if known."""
        if logits.dtype in (torch.float16, torch.bfloat16) and not self.takes_half:
            logits = logits.float()
        masses = self._masses(logits, target, seen)
        return self._of_masses(masses.counted(logits), masses)

    def _masses(self, logits: Tensor, target: Tensor | LabelMixture, seen: tuple[int, int] | None) -> Masses:
        """The target with label smoothing and ignored rows."""
        options = {"weight": self.class_weight, "smoothing": self.label_smoothing, "ignore_index": self.ignore_index}
        return Masses.of(target, logits.shape[1], **options, seen=seen, dtype=logits.dtype)

    def _of_masses(self, logits: Tensor, masses: Masses) -> Tensor:
        """The reduced loss by :meth:`per_label` and :meth:`per_target`."""
        if masses.labels is None:
            precision = torch.promote_types(logits.dtype, torch.float32)
            loss = self.per_target(logits, masses.dense(logits.shape[1], precision))
        else:
            loss = self.per_label(logits, masses.labels)
            loss = loss if self.class_weight is None else masses.weighted(loss)
        return masses.reduced(loss, self.reduction)

    def extra_repr(self) -> str:
        weighted = "" if self.weight is None else f"weight of {len(self.weight)} classes, "
        return f"{weighted}reduction={self.reduction!r}, label_smoothing={self.label_smoothing:g}"


def _unnamed(t: Tensor) -> Tensor:
    """Return a tensor without a class that only names it, as libraries name their images and labels.

    Such classes may refuse to be mixed, and kernels read plain tensors alone. A class that computes in a way of its own
    (``__torch_dispatch__``) is kept.
    """
    if type(t) in PLAIN or torch.compiler.is_compiling():
        return t
    own = [kind for kind in type(t).__mro__ if kind is not Tensor and "__torch_dispatch__" in vars(kind)]
    return t if own else t.as_subclass(Tensor)


@constant_result  # some versions cannot trace is_autocast_available
def has_autocast(kind: str) -> bool:
    """Whether devices of this kind know autocast; meta tensors do not."""
    return torch.amp.is_autocast_available(kind)


class TopKLoss(ClassificationLoss):
    """A :class:`ClassificationLoss` with the set size ``k``, 1 <= k <= n - 1."""

    option_ranges: ClassVar[Mapping[str, Any]] = {"k": "[1, n)"}

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
        self.k = integer(k, "k", at_least=1)

    def checked_option(self, name: str, value: Any) -> Any:
        """See :meth:`Adjustable.checked_option`."""
        value = super().checked_option(name, value)
        return integer(value, "k", at_least=1) if name == "k" else value

    def check_classes(self, n: int) -> None:
        if self.k >= n:
            raise ValueError(f"k must be below the number of classes: k = {self.k}, logits have {n}")

    def extra_repr(self) -> str:
        return f"k={self.k}, {super().extra_repr()}"
