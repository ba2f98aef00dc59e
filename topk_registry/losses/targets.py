"""Conversion of a target into one factor per row and class. This factor is called the mass of the class.

Let L(s, c) be the loss of a row of scores s if class c is the label. For every kind of target, the loss of the row is

    sum_c mass_c L(s, c).

A mass is a product of three factors: the probability of the class after label smoothing, the class weight, and the
sample weight of the row. A weight that is not given is 1. If the reduction is ``"mean"``, every mass is also divided by
the sum of the weights of all rows that are not ignored. Then the sum over rows is the mean. If the targets are class
indices, the weight of a row is the product of its sample weight and the class weight of its label. For distributions
and mixtures, the weight of a row is its sample weight.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topk_registry.losses.label_mixture import LabelMixture, widest
from topk_registry.ops.parts import Parts
from topk_registry.ops.tensors import Route, check_device, route

__all__ = ["LabelMixture", "Masses", "Target"]

Target = Tensor | LabelMixture
REDUCTIONS = ("none", "mean", "sum")
INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


class Masses(NamedTuple):
    """The masses of a batch: the loss of row i is the sum over all classes c of mass[i, c] * (loss for label c).

    If ``dense`` is not None, ``dense`` holds all masses. Otherwise, class ``labels[i, j]`` of row i gets the mass
    ``shares[i, j]``, and every class of row i gets the mass ``even[i]`` in addition.

    Example:
        >>> masses = Masses.of(torch.tensor([1, -100]), 2, label_smoothing=0.5)
        >>> masses.table(2)
        tensor([[0.2500, 0.7500],
                [0.0000, 0.0000]], dtype=torch.float64)
    """

    labels: Tensor | None  # [B, m] int64, each in [0, n); None if `dense` holds the masses
    shares: Tensor | None  # [B, m], the mass of each label
    even: Tensor | None  # [B], the mass that is added to every class; None if this mass is 0
    dense: Tensor | None  # [B, n], the masses of all classes; None if `labels` and `shares` hold the masses
    counts: Tensor | None  # [B] bool, False if all masses of a row are 0; None if no such row was found
    target: Target  # this field and the next fields are the arguments of `of`, for kernels that apply the arguments
    weight: Tensor | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    sample_weight: Tensor | None = None
    share: float | None = None  # the number that all `shares` equal, if this is known

    @classmethod
    def of(
        cls,
        target: Target,
        n: int,
        *,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        sample_weight: Tensor | None = None,
        ignores: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> "Masses":
        """Compute mass[i, c] for a target. The loss of row i is the sum over c of mass[i, c] * (loss for label c).

        Args:
            target: class indices [B], a distribution [B, n] or a :class:`LabelMixture`.
            n: number of classes.
            weight: one factor per class, [n].
            label_smoothing: share of the probability of each row that is spread evenly over all classes.
            ignore_index: if the class index of a row is this number, all masses of the row are 0.
            reduction: if ``"mean"``, the masses are divided so that the sum of all losses is the mean.
            sample_weight: one factor per row, [B].
            ignores: result of :func:`check_target` for the target. If False, no row is ignored.
            dtype: dtype of the logits. If the target is a distribution, its masses have at least this precision.
        """
        if weight is not None:
            if weight.shape != (n,):
                raise ValueError(f"weight has {weight.numel()} entries, logits have {n} classes")
            check_device(weight, "weight", target.labels if isinstance(target, LabelMixture) else target)
        facts = (target, weight, label_smoothing, ignore_index, reduction, sample_weight)
        if isinstance(target, Tensor) and target.is_floating_point():
            q = target.to(torch.promote_types(torch.promote_types(target.dtype, dtype), torch.float32))
            if label_smoothing:
                q = torch.lerp(q, torch.full_like(q, 1 / n), label_smoothing)
            factor: Any = None
            if sample_weight is not None:
                factor = _scale(q.new_ones(len(q)), reduction, sample_weight)
            elif reduction == "mean" and len(q):
                factor = 1.0 / len(q)
            if weight is not None:
                factor = weight.to(q) if factor is None else weight.to(q) * factor
            return cls(None, None, None, q if factor is None else q * factor, None, *facts)
        if not ignores and weight is None and sample_weight is None and isinstance(target, Tensor):
            rows = target.shape[0]
            share = 1.0 / rows if reduction == "mean" and rows else 1.0
            # a tensor that was made while torch traces has no values, and must not be kept
            equal = _equal.__wrapped__ if torch._C._len_torch_dispatch_stack() else _equal
            even = equal(label_smoothing * share / n, rows) if label_smoothing else None
            share *= 1.0 - label_smoothing
            return cls(target.long().unsqueeze(1), equal(share, rows, 1), even, None, None, *facts, share)
        if isinstance(target, LabelMixture):
            mixture, counts = target.wide().smooth(label_smoothing), None
            rows = torch.ones_like(mixture.shares[:, 0])
            mass = mixture.shares.abs().sum(1) + (0 if mixture.uniform is None else mixture.uniform)
            if not is_readable(mass) or not bool(mass.all()):
                counts = mass != 0
        else:
            labels = target.long()
            counts = labels != ignore_index if ignores else None
            labels = labels if counts is None else labels.masked_fill(~counts, 0)
            rows = torch.ones_like(labels, dtype=widest(labels)) if counts is None else counts.to(widest(labels))
            mixture = LabelMixture(labels[:, None], rows[:, None]).smooth(label_smoothing)
            rows = rows if weight is None else rows * weight.to(rows)[labels]
        labels, shares, even = mixture
        scale = _scale(rows, reduction, sample_weight)
        if scale is not None:
            shares = shares * scale
        if even is not None:
            even = (even if scale is None else even * scale[:, 0]) / n
        if weight is not None:
            wide = weight.to(shares)
            shares = shares * wide[labels]
            if even is not None:
                table = (even[:, None] * wide).scatter_add(1, labels, shares)
                return cls(None, None, None, table, counts, *facts)
        return cls(labels, shares, even, None, counts, *facts)

    def table(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return all masses (factors of the losses) as [B, n]. If ``dtype`` is None, the stored dtype is kept."""
        return Parts(self.labels, self.shares, self.even, self.dense).table(n, dtype)

    def usable(self, scores: Tensor) -> Tensor:
        """Return the scores with every ignored row set to 0, so that NaN in an ignored row causes no NaN gradient."""
        return scores if self.counts is None else torch.where(self.counts[:, None], scores, 0.0)


def _scale(rows: Tensor, reduction: str, sample_weight: Tensor | None) -> Tensor | None:
    # rows [B] holds the factor of each row in the divisor of the mean, without the sample weight
    scale = None if sample_weight is None else sample_weight.to(rows)
    if reduction == "mean":
        scale = 1.0 / rows.sum() if scale is None else scale / (rows * scale).sum()
    return None if scale is None else scale.reshape(-1, 1)


@lru_cache(maxsize=16)
def _equal(mass: float, *shape: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full(shape, mass, dtype=torch.float64, device="cpu")


def is_readable(t: Tensor) -> bool:
    return t.device.type == "cpu" and route(t) is Route.KERNELS


def check_tensor(given: Any, name: str) -> None:
    """Raise a TypeError unless the argument ``given`` is a tensor. The error message contains ``name``."""
    if isinstance(given, Tensor):
        return
    if hasattr(given, "logits") or (isinstance(given, Mapping) and "logits" in given):
        hint = "pass its logits"
    elif isinstance(given, (tuple, list)) and any(isinstance(one, Tensor) for one in given):
        hint = "pass one of its tensors"
    else:
        hint = "convert it with torch.as_tensor"
    raise TypeError(f"{name} must be a tensor, got {type(given).__name__}: {hint}")


def check_logits(logits: Any, name: str = "logits") -> None:
    """Raise an error unless the logits are a floating-point tensor [B, n] with n >= 2."""
    check_tensor(logits, name)
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"{name} must be floating point [batch, classes] with at least 2 classes, "
            f"got {logits.dtype} {list(logits.shape)}"
        )


def check_target(logits: Tensor, target: Any, ignore_index: int = -100) -> bool:
    """Raise an error unless the target fits logits [B, n]. Return True if a class index could be ``ignore_index``.

    On a CPU, each index must be in [0, n) or equal to ``ignore_index``. On a GPU, indices are not checked, because the
    check would wait for the GPU. The result is then True, and an invalid index fails later, as in cross-entropy.
    """
    B, n = logits.shape
    mixture = isinstance(target, LabelMixture)
    if mixture:
        target.check(B)
        dense, parts = False, [part for part in target if part is not None]
    else:
        check_tensor(target, "target")
        dense, parts = target.dtype not in INTEGERS, (target,)
        if target.shape != (logits.shape if dense else (B,)) or (dense and not target.is_floating_point()):
            raise ValueError(
                f"target must be class indices (integer, [{B}]) or a distribution (floating point, {[B, n]}), "
                f"got {target.dtype} {list(target.shape)}"
            )
    for part in parts:
        if part.device != logits.device:
            raise ValueError(f"target must be on the device of the logits, {logits.device}, got {part.device}")
    labels = parts[0]
    if dense or not labels.numel() or not is_readable(labels):
        return not (dense or mixture)
    low, high = labels.aminmax()
    low, high = low.item(), high.item()
    if low >= 0 and high < n:
        return not mixture and low <= ignore_index <= high
    labels = labels.long()  # in uint8, an ignore_index of -100 would become 156
    wrong = ((labels < 0) | (labels >= n)) & (mixture | (labels != ignore_index))
    if wrong.any():
        allowed = "" if mixture else f" (or ignore_index = {ignore_index})"
        raise ValueError(f"target must be in [0, {n - 1}]{allowed}, got {labels[wrong][0].item()}")
    return True
