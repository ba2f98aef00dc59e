"""Masses and the operator on logits, from the parts that there are until the losses bring theirs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.targets.checks import check_target
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses as _Masses


class Masses(NamedTuple):
    labels: Tensor | None = None
    shares: Tensor | None = None
    even: Tensor | None = None
    dense: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def of(
        cls, target: Any, n: int, like: Tensor, *, weight: Tensor | None, reduction: str, label_smoothing: float,
        ignore_index: int,
    ) -> "Masses":  # fmt: skip
        check_target(like.new_zeros(()).expand(len(like), n), target, ignore_index=ignore_index, look=True)
        options = {"smoothing": label_smoothing, "ignore_index": ignore_index, "dtype": like.dtype}
        old = _Masses.of(target, n, weight=weight, **options)
        target, factor = old.folded(reduction)
        counts = None if old.ignored is None else ~old.ignored
        if isinstance(target, Tensor) and not target.is_floating_point():
            target = LabelMixture.smoothed(target, 0.0)
        if isinstance(target, Tensor) or (target.uniform is not None and weight is not None):
            dense = (target if isinstance(target, Tensor) else target.dense(n, torch.float64)).to(like) * factor
            return cls(dense=dense if weight is None else dense * weight.to(dense), counts=counts)
        shares = target.shares.double() * factor
        if weight is not None:
            shares = shares * weight[target.labels]
        even = None if target.uniform is None else target.uniform * factor / n
        return cls(target.labels, shares, even, counts=counts)


def smooth_topk(logits: Tensor, masses: Masses, *, k: int, tau: float, alpha: Tensor) -> Tensor:
    q = masses.dense
    if q is None:
        q = torch.zeros_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        q = q if masses.even is None else q + masses.even[:, None].to(q)
        q = q.scatter_add(1, masses.labels, masses.shares.to(q))
    return smooth_topk_hinge(logits, q, k, tau=tau, alpha=alpha)
