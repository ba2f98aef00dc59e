"""Base classes of classification losses."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from topk_registry.losses.adjustable import Adjustable
from topk_registry.ops.backend import PLAIN, constant_in_graphs, is_readable
from topk_registry.ops.masses import LabelMixture, Masses, Reduction, Target, check_tensor

__all__ = ["ClassificationLoss", "CommonOptions", "SoftmaxLoss", "TopKLoss"]


class CommonOptions(TypedDict, total=False):
    """Options of every ClassificationLoss. A subclass declares these options as ``**common: Unpack[CommonOptions]``."""

    weight: Tensor | Sequence[float] | None
    reduction: Reduction
    label_smoothing: float
    ignore_index: int


class ClassificationLoss(Adjustable):
    """Base class of losses that are called as ``loss(logits, target)``.

    This class handles targets, class weights, label smoothing, ignored rows, half precision and the reduction. A
    subclass defines :meth:`per_class`: for B rows of logits [B, n], this method returns the loss of each row for each
    possible label, [B, n]. If the loss for one label costs less than the losses for all n labels, the subclass should
    also define :meth:`per_label`.

    The shapes are the shapes of ``torch.nn.CrossEntropyLoss``. Logits are [B, n], [B, n, d1, ...] or [n]. The target
    consists of class indices or class probabilities. Class indices are [B], [B, d1, ...] or []. Class probabilities
    have the shape of the logits. For logits [B, n], a :class:`LabelMixture` (a few labels per row) is possible too.

    Each option is also an attribute that can be assigned, for example ``loss.reduction = "sum"``. If the value is not
    allowed, the assignment raises a ValueError.

    Args:
        weight: one non-negative factor per class, [n]. The loss for a label is multiplied by the factor of this label.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``. With class indices and class weights, the mean divides by the
            sum of the weights of the labels. Otherwise, the mean divides by the number of rows.
        label_smoothing: share of the target distribution that is spread evenly over all classes.
        ignore_index: if the target of a row is this index, the row has loss 0 and does not count in the mean.

    Example:
        >>> class ZeroOne(ClassificationLoss):
        ...     def per_class(self, logits):
        ...         return (logits < logits.amax(-1, keepdim=True)).to(logits.dtype)
        >>> ZeroOne()(torch.eye(3), torch.tensor([0, 1, 1]))
        tensor(0.3333)
    """

    weight: Tensor | None
    # first epoch, counted from 0, with another loss function than epoch 0; None if the function never changes
    first_change: int | None = None
    _epoch_was_set = False
    _average: Callable[[Tensor], Tensor] | None = None  # set by mean_over_ranks

    def __init__(
        self,
        *,
        weight: Annotated[Tensor | Sequence[float] | None, "[0, inf)"] = None,
        reduction: Reduction = "mean",
        label_smoothing: Annotated[float, "[0, 1]"] = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.set_option("weight", weight)
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index

    def per_class(self, logits: Tensor) -> Tensor:
        """Return the losses [B, n] for logits [B, n]: entry (i, c) is the loss of row i if class c is the label.

        Logits in half precision are converted to float32 before the call, and autocast is off. In rows whose target
        is ``ignore_index``, all logits are 0.
        """
        raise TypeError(f"{type(self).__name__} must define per_class(logits [B, n]) -> [B, n]")

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [B] for logits [B, n] and labels [B], one label per row. Each label is in [0, n).

        By default, select the losses from :meth:`per_class`. If a target is ``ignore_index``, its row has label 0.
        """
        return self._checked(self.per_class(logits), "per_class", logits.shape).gather(1, labels[:, None])[:, 0]

    def losses_of(self, logits: Tensor, masses: Masses) -> Tensor:
        """Return the weighted losses of all rows [B]. Unless the reduction is ``"none"``, their sum [] is allowed too.

        ``masses`` holds a factor mass[i, c] for each row i and class c. The weighted loss of row i is the sum over c of
        mass[i, c] times the loss for label c. By default, this method calls :meth:`per_label` if each row has a single
        label, and :meth:`per_class` otherwise. A loss with an operator for all rows overrides this method. The logits
        have the dtype that the caller passed, and autocast is off.
        """
        scores = logits.float() if logits.dtype.itemsize < 4 else logits
        if masses.counts is not None:
            scores = masses.usable(scores)
        if masses.labels is not None and masses.even is None and masses.labels.shape[1] == 1:
            assert masses.shares is not None
            losses = self._checked(self.per_label(scores, masses.labels[:, 0]), "per_label", scores.shape[:1])
            if isinstance(masses.scale, float):  # all labels have this mass
                return losses * masses.scale
            return _product(masses.shares[:, 0].to(losses.dtype), losses)
        table = self._checked(self.per_class(scores), "per_class", scores.shape)
        return _product(masses.table(scores.shape[1], table.dtype), table).sum(1)

    def predictive_logits(self, logits: Tensor) -> Tensor:
        """Return logits whose softmax is the distribution that the loss predicts. Default: the logits.

        A subclass overrides this method if the softmax of the logits is not what the loss fits, for example because the
        loss multiplies logits by a factor. The function must be elementwise. Evaluation, export, ``compare`` and
        prediction sets use these logits.
        """
        return logits

    @property
    def marginal_temperature(self) -> float | None:
        """Temperature of the top-k marginals that the loss fits. None if the loss is not a function of marginals.

        :meth:`topk_registry.TopKHead.of_loss`, evaluation and export divide :meth:`predictive_logits` by this number to
        compute top-k marginals. If it is None, they use 1.
        """
        return None

    def check_classes(self, n: int) -> None:
        """Raise a ValueError if an option does not allow n classes, for example k >= n.

        The loss calls this method in the first call with n classes, and again after an option or the epoch changed.
        """

    @property
    def class_weight(self) -> Tensor | None:
        """Class weights [n], or None if all classes have weight 1. A subclass may change the weights per epoch."""
        return self._buffers["weight"]  # much faster than self.weight

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that begins, counted from 0. A loss with a schedule extends this method."""
        vars(self).update(_epoch_was_set=True, _classes=None)

    def forward(self, logits: Tensor, target: Target, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss: a scalar [], or one loss per row if the reduction is ``"none"``.

        Args:
            logits, target: in the shapes that the documentation of the class lists.
            sample_weight: one factor w_i per row, [B] for logits [B, n]. Let L_i be the loss of row i. The mean is
                sum_i w_i L_i / sum_i w_i over all rows i that are not ignored. With class indices y_i and class
                weights v, the divisor is sum_i w_i v[y_i] instead.
        """
        if type(logits) not in PLAIN:
            logits = _plain(logits, "logits")
        if type(target) not in PLAIN:
            target = _plain(target, "target")
        shape = None
        if logits.ndim not in (0, 2) and not isinstance(target, LabelMixture):
            logits, target, shape = _as_rows(logits, target)
        if sample_weight is not None:
            sample_weight = _sample_weights(sample_weight, logits, shape)
        compiling = torch.compiler.is_compiling()
        trains = logits.requires_grad and torch.is_grad_enabled()
        masses = Masses.of(
            logits,
            target,
            weight=self.class_weight,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            sample_weight=sample_weight,
            average=self._average if trains and self.training else None,
        )
        if compiling or logits.shape[1] != self._classes:
            self.check_lengths(logits.shape[1])
            self.check_classes(logits.shape[1])
            if not compiling:
                vars(self)["_classes"] = logits.shape[1]
        if trains and self.first_change is not None and not compiling and not self._epoch_was_set:
            self._warn_missing_set_epoch()
        kind = logits.device.type
        if (kind == "cpu" or has_autocast(kind)) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                losses = self.losses_of(logits, masses)
        else:
            losses = self.losses_of(logits, masses)
        if masses.counts is not None and self.reduction == "mean":
            losses = masses.nan_without_rows(losses)
        if losses.ndim == 0:  # losses_of has already summed over rows
            return losses
        if self.reduction != "none":
            # the mean over zero rows is NaN, as in torch's cross-entropy
            some = len(losses) or self.reduction == "sum" or self._average is not None
            return losses.sum() if some else losses.sum() * torch.nan
        return losses if shape is None else losses.reshape(shape)

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, logits: Tensor, target: Target, sample_weight: Tensor | None = None) -> Tensor: ...

    def _checked(self, losses: Tensor, method: str, shape: torch.Size) -> Tensor:
        if losses.shape != shape:
            raise ValueError(f"{type(self).__name__}.{method} must return {list(shape)}, got {list(losses.shape)}")
        return losses

    def _warn_missing_set_epoch(self) -> None:
        self._epoch_was_set = True
        warnings.warn(
            f"{type(self).__name__} changes in epoch {self.first_change}, counted from 0: call set_epoch(epoch) "
            "before each epoch; otherwise the loss of epoch 0 is used throughout",
            stacklevel=3,
        )


class SoftmaxLoss(ClassificationLoss):
    """Base class of losses that are a function of the cross-entropy nll = -log softmax(logits)_y of a label y.

    A subclass defines this function as :meth:`curve`.

    Example:
        >>> class Squared(SoftmaxLoss):
        ...     def curve(self, nll):
        ...         return nll.square()
        >>> Squared()(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.4805)
    """

    def curve(self, nll: Tensor) -> Tensor:
        """Return the loss for each entry of ``nll`` = -log p, in the same shape; p is the probability of a label."""
        raise TypeError(f"{type(self).__name__} must define curve(nll)")

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._checked(self.curve(F.cross_entropy(logits, labels, reduction="none")), "curve", labels.shape)

    def per_class(self, logits: Tensor) -> Tensor:
        nll = -logits.log_softmax(1)
        if is_readable(nll) and bool(nll.detach().sum() < torch.inf):
            return self._checked(self.curve(nll), "curve", nll.shape)
        excluded = nll == torch.inf  # the logit is -inf; there, the gradient of the curve would be 0 * inf = NaN
        limit = self.curve(torch.full((), torch.inf, dtype=nll.dtype, device=nll.device)).detach()
        table = self._checked(self.curve(nll.masked_fill(excluded, 1.0)), "curve", nll.shape)
        return torch.where(excluded, limit, table)


class TopKLoss(ClassificationLoss):
    """Base class of losses with an option ``k``, the number of top classes. With n classes, k must be below n."""

    def __init__(self, k: Annotated[int, "[1, n)"] = 5, **common: Unpack[CommonOptions]) -> None:
        super().__init__(**common)
        self.k = k

    def check_classes(self, n: int) -> None:
        if self.k >= n:
            raise ValueError(f"k must be below the number of classes: k = {self.k}, logits have {n}")


def _product(mass: Tensor, losses: Tensor) -> Tensor:
    # If the mass is 0, the product is 0 even if the loss is infinite or NaN. Finite losses are kept, because the
    # gradient with respect to the mass is the loss.
    product = mass * losses
    if is_readable(losses) and math.isfinite(product.detach().sum().item()):
        return product  # so no loss that is infinite or NaN has mass 0
    return mass * losses.masked_fill((mass == 0) & ~losses.isfinite(), 0.0)


def _as_rows(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Reshape logits [B, n, d1, ...] or [n] and the target to rows. Also return the shape of the unreduced losses."""
    classes = min(1, logits.ndim - 1)
    shape = (*logits.shape[:classes], *logits.shape[classes + 1 :])
    dense = target.is_floating_point()
    if target.shape != (logits.shape if dense else shape):
        raise ValueError(
            f"target must be class indices (integer, {list(shape)}) or a distribution (floating point, "
            f"{list(logits.shape)}), got {target.dtype} {list(target.shape)}"
        )
    n, count = logits.shape[classes], math.prod(shape)  # -1 would be ambiguous if there are no rows
    rows = logits.movedim(classes, -1).reshape(count, n)
    return rows, target.movedim(classes, -1).reshape(count, n) if dense else target.reshape(count), shape


def _sample_weights(weight: Any, logits: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    check_tensor(weight, "sample_weight")
    expected = logits.shape[:1] if shape is None else shape
    if tuple(weight.shape) != tuple(expected) or weight.device != logits.device:
        raise ValueError(
            f"sample_weight must be {list(expected)} on {logits.device}, got {list(weight.shape)} on {weight.device}"
        )
    return weight.detach().to(torch.float32 if weight.device.type == "mps" else torch.float64).reshape(len(logits))


def _plain(t: Any, name: str) -> Any:
    # Tensors of some subclasses, such as fastai's, reject other tensors, and are therefore converted to plain tensors.
    # Subclasses with __torch_dispatch__ define their own arithmetic, and are not converted.
    if isinstance(t, LabelMixture) or torch.compiler.is_compiling():
        return t
    check_tensor(t, name)
    computes = any(kind is not Tensor and "__torch_dispatch__" in vars(kind) for kind in type(t).__mro__)
    return t if computes else t.as_subclass(Tensor)


@constant_in_graphs  # some versions of the compiler cannot trace is_autocast_available
def has_autocast(kind: str) -> bool:
    """Return whether autocast supports a device type such as "cuda". For example, autocast does not support "meta"."""
    return torch.amp.is_autocast_available(kind)
