"""Linear classifier and the soft top-k of one threshold in one, for more classes than there is memory for logits."""

import math
from typing import Any

from torch import Tensor

from topk_registry.ops.ksubset.chunked.api import chunk_size, logits_like, product_dtype
from topk_registry.ops.ksubset.chunked.parallel import Shard, shard_of
from topk_registry.ops.process_group import GatherRows, OwnRows, SameOnAllRanks, agreed, gather_rows, outside_graphs
from topk_registry.ops.targets.checks import check_target
from topk_registry.ops.targets.masses import Masses, Reduction
from topk_registry.ops.threshold.spread import LabelLosses

FACTS = ("number of rows", "features", "classes of a rank", "k", "tau", "class_weight", "reduction", "ignore_index")


@outside_graphs
def linear_soft_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    k: float = 5,
    tau: float = 1.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    chunk: int | None = None,
    process_group: Any = None,
    replicated: bool = False,
    averaged: bool = True,
) -> Tensor:
    """Compute the loss ``soft_topk`` of ``F.linear(features, weight, bias)``, a chunk of the classes at a time.

    Loss and gradients are those of all logits at once. Each step towards the threshold multiplies features and weight
    again, two to seven times on normal scores, and the backward pass once more. Nothing else grows with k.

    With ``process_group`` the classes are spread over its ranks, as in :func:`linear_smooth_topk`: each rank passes its
    own rows of the batch and the weight of its own classes, ceil(n / ranks) of them, fewer on the last ranks. For each
    step the ranks exchange ten numbers a row. Every rank must call ``backward``.

    Args:
        features: [B, d].
        weight: the classifier's [n, d].
        bias: the classifier's [n], or None.
        target: class indices [B]. For distributions take ``soft_topk`` on the logits.
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive.
        class_weight: one non-negative factor for each class [n] of all ranks.
        reduction, ignore_index: as in ``F.cross_entropy``, over the rows of all ranks.
        chunk: number of classes at a time; None chooses for speed.
        process_group: the ranks that hold the classes.
        replicated: all ranks pass the same rows, which are then counted once.
        averaged: whether the backbone's gradients are averaged over ranks afterwards, as in
            :func:`linear_smooth_topk`.

    Returns:
        The loss, a number or [B], in float32 or float64. It is differentiable once.

    Example:
        >>> features = torch.randn(8, 64, requires_grad=True)
        >>> weight = torch.randn(10_000, 64, requires_grad=True)
        >>> linear_soft_topk(features, weight, None, torch.randint(10_000, (8,)), k=500).backward()

    Reference: Gupta et al., *Dual-Encoders for Extreme Multi-label Classification*, ICLR 2024.
    """
    own = logits_like(features, weight, bias).shape[1]

    def facts() -> dict[str, float]:
        if not 0.0 < tau < math.inf:
            raise ValueError(f"tau must be positive and finite, got {tau!r}")
        if not 0.0 < k < math.inf:
            raise ValueError(f"k must be a number above 0 and below the number of classes, got {k!r}")
        if not isinstance(target, Tensor) or target.is_floating_point():
            raise ValueError("target must be class indices [B]; for distributions take soft_topk on the logits")
        found = len(features), features.shape[1], own, k, tau, 0 if class_weight is None else class_weight.numel()
        return dict(zip(FACTS, (*found, Reduction.of(reduction), ignore_index), strict=True))

    if process_group is None:
        facts()
        shard, sizes = Shard(None, own, 0, own), [len(features)]
    else:
        different = (*(() if replicated else ("number of rows",)), "classes of a rank")
        found = agreed(facts, FACTS, process_group, features.device, may_differ=different)
        shard = shard_of(found["classes of a rank"], None, process_group)
        sizes = [int(rows) for rows in found["number of rows"]]
    if k >= shard.n:
        raise ValueError(f"k must be below the number of classes: k = {k}, weight has {shard.n}")

    def checked() -> dict[str, float]:
        check_target(features.new_zeros(()).expand(len(features), shard.n), target, ignore_index=ignore_index)
        return {}

    x, label = features, target
    if process_group is None:
        checked()
    else:
        agreed(checked, (), process_group, features.device)
        if replicated:
            x = SameOnAllRanks.apply(features, process_group, 1.0)
        else:
            x = GatherRows.apply(features, sizes, process_group, float(len(sizes)) if averaged else 1.0)
            label = gather_rows(target, sizes, process_group)
    dtype = product_dtype(features)
    masses = Masses.of(label, shard.n, weight=class_weight, ignore_index=ignore_index, dtype=dtype)
    assert masses.labels is not None, "other targets are refused above"
    place, size = shard.local(masses.labels), chunk_size(features, 1, chunk)
    rows = LabelLosses.apply(x, weight, bias, place, float(k), float(tau), size, dtype, process_group)
    if class_weight is not None and masses.counts is not None:  # a class of no weight costs nothing, were it infinite
        rows = masses.weighted(rows.masked_fill((masses.counts == 0) & rows.isinf(), 0.0))
    loss = masses.reduced(rows, reduction)
    own_rows = reduction == "none" and process_group is not None and not replicated
    return OwnRows.apply(loss, sizes, process_group) if own_rows else loss
