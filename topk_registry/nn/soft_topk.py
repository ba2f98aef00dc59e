"""Linear classifier and the soft top-k of one threshold in one, for more classes than there is memory for logits."""

from typing import Any

from torch import Tensor

from topk_registry.nn.class_parallel import DIFFERENT, check_classes, check_rows, gathered
from topk_registry.ops.distributed import is_distributed
from topk_registry.ops.ksubset.chunked.api import chunk_size, logits_like, product_dtype
from topk_registry.ops.ksubset.chunked.parallel import FACTS, Shard, describe, shard_of
from topk_registry.ops.process_group import GatherRows, OwnRows, SameOnAllRanks, agreed, outside_graphs
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses, Reduction
from topk_registry.ops.threshold.spread import Goal, TargetLosses
from topk_registry.ops.values import number


@outside_graphs
def linear_soft_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | LabelMixture,
    *,
    k: float = 5,
    tau: float = 1.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    chunk: int | None = None,
    process_group: Any = None,
    num_classes: int | None = None,
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
        target: class indices [B], a distribution [B, n] or a :class:`LabelMixture`. Distributions, and with them label
            smoothing, take one more pass over all chunks. Targets get no gradient.
        k: how many classes are chosen, 0 < k < n; it may be any real number.
        tau: temperature, positive.
        class_weight: one non-negative factor for each class [n] of all ranks.
        reduction, label_smoothing, ignore_index: as in ``F.cross_entropy``, over the rows of all ranks.
        chunk: number of classes at a time; None chooses for speed.
        process_group: the ranks that hold the classes.
        num_classes: n, checked against what the ranks hold; None for their sum.
        replicated: all ranks pass the same rows, which are then counted once.
        averaged: whether the backbone's gradients are averaged over ranks afterwards, as in
            :func:`linear_smooth_topk`.

    Returns:
        The loss, a number or [B], in float32 or float64. It is differentiable once.

    Raises:
        ValueError: on every rank, if one has bad input or two disagree on an option.

    Example:
        >>> features = torch.randn(8, 64, requires_grad=True)
        >>> weight = torch.randn(10_000, 64, requires_grad=True)
        >>> linear_soft_topk(features, weight, None, torch.randint(10_000, (8,)), k=500).backward()

    Reference: Gupta et al., *Dual-Encoders for Extreme Multi-label Classification*, ICLR 2024.
    """
    if is_distributed(weight):
        raise ValueError("weight must be a plain tensor with the rows of this rank's classes, got a DTensor")
    own, group = logits_like(features, weight, bias).shape[1], process_group

    def facts() -> dict[str, float]:
        _check_options(k, tau, label_smoothing)
        check_classes(num_classes, 0.0, class_weight)
        check_rows(features, target, num_classes, ignore_index)
        return {
            "number of rows": len(features),
            "features": features.shape[1],
            "classes of a rank": own,
            "num_classes": num_classes or -1,
            "k": k,
            "labels": describe(target),
            "tau": tau,
            "class_weight": 0 if class_weight is None else class_weight.numel(),
            "reduction": Reduction.of(reduction),
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
        }

    if group is None:
        if num_classes not in (None, own):
            raise ValueError(f"weight has {own} rows, num_classes is {num_classes}")
        num_classes = own
        facts()
        shard, sizes, replicated = Shard(None, own, 0, own), [len(features)], True
    else:
        of_ranks = agreed(facts, FACTS, group, features.device, may_differ=DIFFERENT[replicated:])
        shard = shard_of(of_ranks["classes of a rank"], num_classes, group)
        sizes = [int(rows) for rows in of_ranks["number of rows"]]
    if k >= shard.n:
        raise ValueError(f"k must be below the number of classes: k = {k}, weight has {shard.n}")
    if not num_classes:  # only now is the number of classes known, as the sum over the ranks
        check_classes(shard.n, 0.0, class_weight)
        agreed(lambda: check_rows(features, target, shard.n, ignore_index), (), group, features.device)
    x, dtype, own_rows = features, product_dtype(features), not replicated and reduction == "none"
    if not replicated:
        x = GatherRows.apply(features, sizes, group, float(len(sizes)) if averaged else 1.0)
        target = gathered(target, sizes, shard)
    elif group is not None:
        x = SameOnAllRanks.apply(features, group, 1.0)
        if isinstance(target, Tensor) and target.is_floating_point():
            target = target[:, shard.first : shard.first + shard.size]
    options = {"weight": class_weight, "smoothing": label_smoothing, "ignore_index": ignore_index}
    masses = Masses.of(target, shard.n, **options, dtype=dtype)
    goal, size = _goal(masses.target, shard, class_weight), chunk_size(features, 1, chunk)
    rows = TargetLosses.apply(
        masses.counted(x), weight, bias, goal, float(k), float(tau), size, dtype, group
    )  # fmt: skip
    loss = masses.reduced(rows, reduction)
    return OwnRows.apply(loss, sizes, group) if own_rows else loss


def _check_options(k: float, tau: float, label_smoothing: float) -> None:
    """Raise unless the options are in range."""
    number(tau, "tau", above=0)
    number(k, "k", above=0)
    number(label_smoothing, "label_smoothing", at_least=0, at_most=1)


def _goal(target: Tensor | LabelMixture, shard: Shard, class_weight: Tensor | None) -> Goal:
    """The target of all rows on this rank's classes; a distribution is its part of it [B, size]."""
    part = None if class_weight is None else shard.part(class_weight)
    if isinstance(target, Tensor) and target.is_floating_point():
        none = target.new_empty(len(target), 0)
        return Goal(none.long(), none, target, part)
    mixture = LabelMixture.smoothed(target, 0.0) if isinstance(target, Tensor) else target
    shares = mixture.shares if class_weight is None else mixture.shares * class_weight[mixture.labels]
    labels, even = shard.local(mixture.labels), None
    if mixture.uniform is not None:
        even = (mixture.uniform / shard.n)[:, None].expand(-1, shard.size)
    return Goal(labels, shares, even, part)
