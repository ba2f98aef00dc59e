"""Conversion of a target into one factor per row and class. This factor is called the mass of the class.

Let L(s, c) be the loss of a row of scores s if class c is the label. For every kind of target, the loss of the row is

    sum_c mass_c L(s, c).

A mass is a product of three factors: the probability of the class after label smoothing, the class weight, and the
sample weight of the row. A weight that is not given is 1. If the reduction is ``"mean"``, every mass is also divided by
the sum of the weights of all rows that are not ignored. Then the sum over rows is the mean. If the targets are class
indices, the weight of a row is the product of its sample weight and the class weight of its label. For distributions
and mixtures, the weight of a row is its sample weight.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from topk_registry.checks import choice
from topk_registry.ops.backend import Route, check_device, is_readable, route

TAILS = ("uniform", "drop", "renormalize")
MAX_TOTAL = 1.01  # of stored probabilities, which have relative errors up to 0.004 in bfloat16
Reduction = Literal["none", "mean", "sum"]
REDUCTIONS = get_args(Reduction)
INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


class Masses(NamedTuple):
    """The masses of a batch: the loss of row i is the sum over all classes c of mass[i, c] * (loss for label c).

    If ``dense`` is not None, ``dense`` holds all masses. Otherwise, class ``labels[i, j]`` of row i gets the mass
    ``shares[i, j]``, and every class of row i gets the mass ``even[i]`` in addition.

    Example:
        >>> masses = Masses.of(torch.zeros(2, 2), torch.tensor([1, -100]), label_smoothing=0.5)
        >>> masses.table(2)
        tensor([[0.2500, 0.7500],
                [0.0000, 0.0000]], dtype=torch.float64)
    """

    labels: Tensor | None  # [B, m] int64, each in [0, n); None if `dense` holds the masses
    shares: Tensor | None  # [B, m], the mass of each label
    even: Tensor | None  # [B], the mass that is added to every class; None if this mass is 0
    dense: Tensor | None  # [B, n], the masses of all classes; None if `labels` and `shares` hold the masses
    counts: Tensor | None = None  # [B] bool, False if all masses of a row are 0; None if no such row was found
    target: "Target | None" = None  # what the masses were computed from
    # sample weight of each row, divided by the divisor of the mean: [B] or [1], or a number if all rows have the same
    # factor. With one label per row and without `even`, the number is also the mass of each label. None: 1.
    scale: Tensor | float | None = None

    @classmethod
    def of(
        cls,
        logits: Tensor,
        target: "Target",
        *,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        sample_weight: Tensor | None = None,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> "Masses":
        """Check a batch and compute mass[i, c]. The loss of row i is the sum over c of mass[i, c] * (loss for label c).

        Args:
            logits: scores [B, n]. Their values are not read.
            target: class indices [B], a distribution [B, n] or a :class:`LabelMixture`.
            weight: one factor per class, [n].
            label_smoothing: share of the probability of each row that is spread evenly over all classes.
            ignore_index: if the class index of a row is this number, all masses of the row are 0.
            reduction: if ``"mean"``, the masses are divided so that the sum of all losses is the mean.
            sample_weight: one factor per row, [B].
            average: function from the divisor [] of the mean over the rows of this process to the mean of the divisors
                of all processes. None: there are no other processes.

        Raises:
            TypeError: the logits or the target are not tensors.
            ValueError: a shape, a dtype or a class index is not allowed, see :func:`check_batch`.
        """
        ignores = check_batch(logits, target, ignore_index)
        B, n = logits.shape
        if weight is not None:
            if weight.shape != (n,):
                raise ValueError(f"weight has {weight.numel()} entries, logits have {n} classes")
            check_device(weight, "weight", logits)
        if isinstance(target, Tensor) and target.is_floating_point():
            q = target.to(torch.promote_types(torch.promote_types(target.dtype, logits.dtype), torch.float32))
            if label_smoothing:
                q = torch.lerp(q, torch.full_like(q, 1 / n), label_smoothing)
            scale: Any = None
            if sample_weight is not None or (average is not None and reduction == "mean"):
                scale = _scale(q.new_ones(B), reduction, sample_weight, average)
            elif reduction == "mean" and B:
                scale = 1.0 / B
            factor: Any = scale[:, None] if isinstance(scale, Tensor) else scale
            if weight is not None:
                factor = weight.to(q) if factor is None else weight.to(q) * factor
            return cls(None, None, None, q if factor is None else q * factor, None, target, scale)
        plain = weight is None and sample_weight is None and average is None
        if plain and not ignores and isinstance(target, Tensor):
            share = 1.0 / B if reduction == "mean" and B else 1.0
            # a tensor that was made while torch traces has no values, and must not be kept
            equal = _equal.__wrapped__ if torch._C._len_torch_dispatch_stack() else _equal
            even = equal(label_smoothing * share / n, B) if label_smoothing else None
            shares = equal(share * (1.0 - label_smoothing), B, 1)
            return cls(target.long().unsqueeze(1), shares, even, None, None, target, share)
        if isinstance(target, LabelMixture):
            mixture, counts = target.wide().smooth(label_smoothing), None
            rows = torch.ones_like(mixture.shares[:, 0])
            mass = mixture.shares.abs().sum(1) + (0 if mixture.uniform is None else mixture.uniform)
            if not is_readable(mass) or not bool(mass.all()):
                counts = mass != 0
        else:
            labels = target.long()  # in uint8, an ignore_index of -100 would become 156
            counts = labels != ignore_index if ignores else None
            labels = labels if counts is None else labels.masked_fill(~counts, 0)
            rows = torch.ones_like(labels, dtype=widest(labels)) if counts is None else counts.to(widest(labels))
            mixture = LabelMixture(labels[:, None], rows[:, None]).smooth(label_smoothing)
            rows = rows if weight is None else rows * weight.to(rows)[labels]
        labels, shares, even = mixture
        scale = _scale(rows, reduction, sample_weight, average)
        if scale is not None:
            shares = shares * scale[:, None]
        if even is not None:
            even = (even if scale is None else even * scale) / n
        if counts is not None:  # if no row counts, the scale of a mean is inf, and 0 * inf is NaN
            shares = torch.where(counts[:, None], shares, 0.0)
            even = None if even is None else torch.where(counts, even, 0.0)
        if weight is not None:
            wide = weight.to(shares)
            shares = shares * wide[labels]
            if even is not None:
                table = (even[:, None] * wide).scatter_add(1, labels, shares)
                return cls(None, None, None, table, counts, target, scale)
        return cls(labels, shares, even, None, counts, target, scale)

    def check(self, logits: Tensor) -> None:
        """Raise a ValueError unless the shapes of the masses fit the logits [B, n]. Kernels rely on these shapes."""
        labels, shares, even, dense = self[:4]
        rows, fits = logits.shape[:1], False
        if dense is not None:
            fits = dense.shape == logits.shape and labels is None and shares is None and even is None
        elif labels is not None and shares is not None:
            fits = labels.ndim == 2 and labels.shape[:1] == rows and shares.shape == labels.shape
            fits = fits and (even is None or even.shape == rows)
        if not fits:
            given = {"labels": labels, "shares": shares, "even": even, "dense": dense}
            shapes = {name: None if t is None else list(t.shape) for name, t in given.items()}
            raise ValueError(
                f"masses must be dense {list(logits.shape)} alone, or labels and shares [{rows[0]}, m] with or without "
                f"even {list(rows)}, got the shapes {shapes}"
            )

    @property
    def has_labels_only(self) -> bool:
        """Whether each row has one label, and no other class has a mass."""
        return self.labels is not None and self.labels.shape[1] == 1 and self.even is None

    @property
    def needs_grad(self) -> bool:
        """Whether a mass requires a gradient."""
        for t in self[1:4]:  # noqa: SIM110 - a generator would be entered once per field
            if t is not None and t.requires_grad:
                return True
        return False

    def rows(self, rows: slice) -> "Masses":
        """Return the masses of some rows, without the fields that only losses read."""
        return Masses(*(None if t is None else t[rows] for t in self[:4]))

    def table(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return all masses (factors of the losses) as [B, n]. If ``dtype`` is None, the stored dtype is kept."""
        if self.dense is not None:
            return self.dense if dtype is None else self.dense.to(dtype)
        assert self.labels is not None
        assert self.shares is not None
        shares = self.shares if dtype is None else self.shares.to(dtype)
        even = shares.new_zeros(len(shares), 1) if self.even is None else self.even.to(shares)[:, None]
        return even.expand(-1, n).scatter_add(1, self.labels, shares)

    def usable(self, scores: Tensor) -> Tensor:
        """Return the scores with every ignored row set to 0, so that NaN in an ignored row causes no NaN gradient."""
        return scores if self.counts is None else torch.where(self.counts[:, None], scores, 0.0)

    def nan_without_rows(self, losses: Tensor) -> Tensor:
        """Return the losses. If a mean ignores all rows, return NaN with gradient 0 instead, as in cross-entropy."""
        if self.counts is None or not isinstance(self.scale, Tensor) or not self.scale.numel():
            return losses
        return torch.add(losses, self.scale[0].to(losses.dtype), alpha=0.0)  # the scale is inf if no row counts


def _scale(
    rows: Tensor, reduction: str, sample_weight: Tensor | None, average: Callable[[Tensor], Tensor] | None
) -> Tensor | None:
    # rows [B] holds the factor of each row in the divisor of the mean, without the sample weight
    scale = None if sample_weight is None else sample_weight.to(rows)
    if reduction == "mean":
        divisor = rows.sum() if scale is None else (rows * scale).sum()
        if average is not None:
            divisor = average(divisor.to(widest(divisor))).to(divisor)
        scale = 1.0 / divisor if scale is None else scale / divisor
    return None if scale is None else scale.reshape(-1)


@lru_cache(maxsize=16)
def _equal(mass: float, *shape: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full(shape, mass, dtype=torch.float64, device="cpu")


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


def check_batch(logits: Any, target: Any, ignore_index: int = -100) -> bool:
    """Raise an error unless the logits and the target fit. Return True if a class index could be ``ignore_index``.

    The logits must be a floating-point tensor [B, n] with n >= 2. On a CPU, each class index must be in [0, n) or equal
    to ``ignore_index``. On a GPU, indices are not checked, because the check would wait for the GPU. The result is then
    True, and an invalid index fails later, as in cross-entropy.
    """
    if not isinstance(logits, Tensor):
        check_tensor(logits, "logits")
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            "logits must be floating point [batch, classes] with at least 2 classes, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    B, n = logits.shape
    mixture = isinstance(target, LabelMixture)
    if mixture:
        target.check(B)
        dense, parts = False, [part for part in target if part is not None]
    else:
        if not isinstance(target, Tensor):
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
    if dense or not labels.numel() or labels.device.type != "cpu" or route(labels) is not Route.KERNELS:
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


class LabelMixture(NamedTuple):
    """One distribution over n classes per row, stored as m labels per row with one share per label.

    The probability of class c is the sum of the shares of all labels equal to c, plus u / n. The field ``uniform``
    holds u, the probability that a row spreads evenly over all n classes. The shares and u need not add up to 1. If all
    are 0, the loss of the row is 0, but the row counts in the mean. A mixture can be faster than a target [B, n].

    Example:
        >>> LabelMixture.mixed(torch.tensor([0, 2]), torch.tensor([2, 2]), 0.75).dense(3)
        tensor([[0.7500, 0.0000, 0.2500],
                [0.0000, 0.0000, 1.0000]])
    """

    labels: Tensor  # [B, m], int64: m labels per row
    shares: Tensor  # [B, m]: the probability of each label
    uniform: Tensor | None = None  # [B]: the probability that is spread evenly over all n classes; None: 0

    @classmethod
    def mixed(cls, label: Tensor, other: Tensor, lam: float | Tensor) -> "LabelMixture":
        """Return a mixture of two labels per row, as in mixup: ``label`` with share lam, ``other`` with share 1 - lam.

        Args:
            label, other: class indices [B].
            lam: one number, or one per row [B].
        """
        lam = torch.as_tensor(lam, dtype=widest(label), device=label.device).expand(len(label))
        return cls(torch.stack((label, other), 1), torch.stack((lam, 1.0 - lam), 1))

    @classmethod
    def from_topk(cls, indices: Tensor, probabilities: Tensor, n: int, tail: str = "uniform") -> "LabelMixture":
        """Return the distribution T of a teacher of which the m largest probabilities of each row are stored.

        Of p_j, the m stored probabilities of a row, the tail t = max(0, 1 - sum_j p_j) is missing. The argument
        ``tail`` says where the tail goes:

        - ``"uniform"``: T is p_j at the stored classes and t / (n - m) at each of the n - m other classes.
        - ``"drop"``: T is p_j at the stored classes and 0 at the other classes. The sum of T is 1 - t.
        - ``"renormalize"``: T is p_j / sum_j p_j at the stored classes and 0 at the other classes.

        Every loss is the loss of the dense target T. For cross-entropy, this is KL(T || softmax(logits)) plus the
        entropy of T, which does not depend on the logits. With ``"drop"``, cross-entropy is sum_j p_j times
        cross-entropy with ``"renormalize"``. If nothing is stored, T is 1 / n with ``"uniform"``, else 0.

        The field ``uniform`` belongs to all n classes. Therefore ``"uniform"`` sets u = t n / (n - m) and reduces each
        share to p_j - u / n, which is below 0 if a stored class is less likely than the mean of the other classes.

        Args:
            indices: classes [B, m], integer, distinct in each row. A negative index marks an empty place.
            probabilities: [B, m], floating point. Entries at empty places are ignored.
            n: number of classes.
            tail: ``"uniform"``, ``"drop"`` or ``"renormalize"``.

        Raises:
            ValueError: an argument is invalid, or a sum of probabilities is above 1.01, more than half precision
                explains. On a GPU, the numbers are not checked.

        Example:
            >>> top = torch.tensor([[0.5, 0.25]])
            >>> LabelMixture.from_topk(torch.tensor([[2, 0]]), top, 4).dense(4)
            tensor([[0.2500, 0.1250, 0.5000, 0.1250]])
        """
        choice(tail, "tail", TAILS)
        integers = not (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool)
        sizes = indices.ndim == 2 and indices.shape[1] > 0 and indices.shape == probabilities.shape
        if not (integers and sizes and probabilities.is_floating_point()):
            raise ValueError(
                "expected indices (integer) and probabilities (floating point), both [B, m] with m > 0, got "
                f"{indices.dtype} {list(indices.shape)} and {probabilities.dtype} {list(probabilities.shape)}"
            )
        labels = indices.long()
        stored = labels >= 0
        p = torch.where(stored, probabilities.to(widest(probabilities)), 0.0)
        total = p.sum(1)
        if is_readable(labels) and is_readable(p):
            _check_stored(labels, p, total, n)
        labels = labels.clamp(min=0)
        if tail == "drop":
            return cls(labels, p)
        if tail == "renormalize":
            return cls(labels, p / torch.where(total == 0, 1.0, total)[:, None])
        others = n - stored.sum(1)
        uniform = torch.where(others == 0, 0.0, (1.0 - total).clamp(min=0) * n / others.clamp(min=1))
        return cls(labels, torch.where(stored, p - (uniform / n)[:, None], 0.0), uniform)

    def smooth(self, share: float) -> "LabelMixture":
        """Move a fraction ``share`` of the probability of each label to ``uniform``, and return the new mixture.

        Example:
            >>> LabelMixture.mixed(torch.tensor([0]), torch.tensor([2]), 0.75).smooth(0.4).dense(4)
            tensor([[0.5500, 0.1000, 0.2500, 0.1000]])
        """
        if not share:
            return self
        spread = share * self.shares.sum(1)
        even = spread if self.uniform is None else self.uniform + spread
        return LabelMixture(self.labels, self.shares * (1.0 - share), even)

    def wide(self) -> "LabelMixture":
        """Return the mixture in double precision, in which sums and products of shares are exact enough."""
        dtype = widest(self.shares)
        uniform = None if self.uniform is None else self.uniform.to(dtype)
        return LabelMixture(self.labels, self.shares.to(dtype), uniform)

    def check(self, rows: int) -> None:
        """Raise a ValueError unless labels, shares and uniform have ``rows`` rows and valid shapes and dtypes."""
        labels, shares, uniform = self
        good = labels.ndim == 2 and len(labels) == rows and labels.shape[1] > 0 and shares.shape == labels.shape
        good = good and labels.dtype == torch.int64 and shares.is_floating_point()
        if not good or (uniform is not None and uniform.shape != (rows,)):
            raise ValueError(
                f"expected labels int64 [{rows}, m], m > 0, shares [{rows}, m] and uniform [{rows}] or None, got "
                f"{labels.dtype} {list(labels.shape)}, {shares.dtype} {list(shares.shape)} and "
                f"{None if uniform is None else list(uniform.shape)}"
            )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "LabelMixture":
        """Return the mixture on another device."""
        device = torch.device(device)

        def moved(part: Tensor) -> Tensor:
            wide = part.dtype == torch.float64 and device.type == "mps"  # MPS does not support float64
            return part.to(device, torch.float32 if wide else part.dtype, non_blocking=non_blocking)

        labels, shares, uniform = self
        return LabelMixture(moved(labels), moved(shares), None if uniform is None else moved(uniform))

    def dense(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the distributions as a tensor [B, n]. Without ``dtype``, the result has torch's default dtype."""
        q = self.shares.new_zeros(len(self.labels), n, dtype=dtype or torch.get_default_dtype())
        if self.uniform is not None:
            q += (self.uniform / n).to(q)[:, None]
        return q.scatter_add_(1, self.labels, self.shares.to(q))


Target = Tensor | LabelMixture


def widest(like: Tensor) -> torch.dtype:
    """Return double precision, or single precision on a device without double precision."""
    return torch.float32 if like.device.type == "mps" else torch.float64  # MPS does not support float64


def _check_stored(labels: Tensor, p: Tensor, total: Tensor, n: int) -> None:
    ordered = labels.sort(1).values
    if bool((labels >= n).any()):
        raise ValueError(f"indices must be below n = {n}, got {labels.max().item()}")
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError("the indices of a row must differ; a negative index marks an empty place")
    if not bool((p >= 0).all() & (total <= MAX_TOTAL).all()):  # also raises for NaN
        raise ValueError(
            "the probabilities of a row must be at least 0 and sum to at most 1, "
            f"got numbers from {p.min().item():g} and sums up to {total.max().item():g}"
        )
