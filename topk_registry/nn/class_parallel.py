"""Smooth top-k SVM of a linear classifier, with its classes spread over the ranks of a process group.

One process uses it too, for soft targets, label smoothing and sampled classes.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from topk_registry.ops.distributed import by_rows_of_layer, is_distributed, whole
from topk_registry.ops.ksubset import request
from topk_registry.ops.ksubset.chunked.api import TopClasses, chunk_size, logits_like, product_dtype
from topk_registry.ops.ksubset.chunked.layer import LayerUpdate
from topk_registry.ops.ksubset.chunked.parallel import (
    DTYPES,
    FACTS,
    Shard,
    describe,
    layout,
    row_losses,
    shard_of,
    top_classes,
)
from topk_registry.ops.process_group import (
    GatherRows,
    Group,
    OwnRows,
    SameOnAllRanks,
    agreed,
    columns_of_all_rows,
    gather_rows,
    outside_graphs,
)
from topk_registry.ops.targets.checks import check_target
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses, Reduction
from topk_registry.ops.values import number

# facts in which ranks may differ; all hold the same replicated rows, so then the first is left out
DIFFERENT = ("number of rows", "classes of a rank")
SAMPLED_UPDATE = (
    "sample cannot be combined with a ChunkedUpdate: it gathers the rows of the classes that take part, and their "
    "optimizer's step would have to move all other rows too. Leave one of the two out"
)


@outside_graphs
def spread_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | LabelMixture,
    *,
    k: int,
    tau: float,
    alpha: float | Tensor,
    class_weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    ignore_index: int,
    chunk: int | None,
    group: Group,
    num_classes: int | None,
    replicated: bool,
    averaged: bool,
    sample: float | None = None,
    generator: torch.Generator | None = None,
    summed: bool = True,
    update: LayerUpdate | None = None,
) -> Tensor:
    """Compute ``linear_smooth_topk`` over the ranks of a group, or in one process for targets of every kind.

    With ``summed``, the gradient of replicated features is the sum over all ranks; without, it is this rank's part.
    """

    def facts() -> dict[str, float]:
        check_options(tau, alpha, reduction, label_smoothing)
        check_classes(num_classes, alpha, class_weight)
        check_rows(features, target, num_classes, ignore_index)
        check_sample(sample, target, label_smoothing)
        if update is not None and sample is not None:
            raise ValueError(SAMPLED_UPDATE)
        return {
            **_facts(features, weight, bias, k),
            "num_classes": num_classes or -1,
            "labels": describe(target),
            "tau": tau,
            "alpha": alpha.numel() + 0.5 if isinstance(alpha, Tensor) and alpha.ndim else float(alpha),
            "class_weight": 0 if class_weight is None else class_weight.numel(),
            "reduction": Reduction.of(reduction),
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "sample": sample or 0,
        }

    if group is None:
        num_classes = num_classes or len(weight)
        facts()
        shard, sizes, replicated = Shard(None, num_classes, 0, len(weight)), [len(features)], True
        if shard.n != shard.size:
            raise ValueError(f"weight has {shard.size} rows, num_classes is {shard.n}")
    else:
        of_ranks = agreed(facts, FACTS, group, features.device, may_differ=DIFFERENT[replicated:])
        shard = shard_of(of_ranks["classes of a rank"], num_classes, group)
        sizes = [int(rows) for rows in of_ranks["number of rows"]]
    request.check(features.new_empty(0, shard.n), k, k * tau)
    if not num_classes:  # only now is the number of classes known, as the sum over the ranks
        check_classes(shard.n, alpha, class_weight)
        agreed(lambda: check_rows(features, target, shard.n, ignore_index), (), group, features.device)
    x, dtype = features, product_dtype(features)
    if not replicated:
        x = GatherRows.apply(features, sizes, group, float(len(sizes)) if averaged else 1.0)
        target = gathered(target, sizes, shard)
    elif group is not None and summed:
        x = SameOnAllRanks.apply(features, group, 1.0)
    alpha = torch.as_tensor(alpha, device=features.device, dtype=request.output_dtype(features)).detach()
    if isinstance(target, Tensor) and target.is_floating_point() and replicated:
        target = target[:, shard.first : shard.first + shard.size]
    options = {"weight": class_weight, "smoothing": label_smoothing, "ignore_index": ignore_index}
    masses = Masses.of(target, shard.n, **options, dtype=dtype)
    if sample is not None:
        labels = masses.target.labels if isinstance(masses.target, LabelMixture) else masses.target
        if 2 * k > shard.n:
            raise ValueError(f"sampling needs at least 2 k = {2 * k} classes, there are {shard.n}")
        shard, weight, bias = sampled(shard, weight, bias, labels, sample, k * tau, generator)
    rows = row_losses(
        masses.counted(x), weight, bias, masses.target, shard, k=k, tau=tau, alpha=alpha, class_weight=class_weight,
        chunk=chunk_size(x, k, chunk), dtype=dtype, update=update,
    )  # fmt: skip
    loss = masses.reduced(rows, reduction)
    return OwnRows.apply(loss, sizes, group) if reduction == "none" and not replicated else loss


@outside_graphs
@torch.no_grad()
def spread_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    temperature: float,
    chunk: int | None,
    group: Group,
    num_classes: int | None,
    replicated: bool,
) -> TopClasses:
    """Compute ``linear_topk`` of this rank's rows over the classes of all ranks."""

    def facts() -> dict[str, float]:
        return {**_facts(features, weight, bias, k), "num_classes": num_classes or -1, "temperature": temperature}

    of_ranks = agreed(facts, FACTS, group, features.device, may_differ=DIFFERENT[replicated:])
    shard = shard_of(of_ranks["classes of a rank"], num_classes, group)
    request.check(features.new_empty(0, shard.n), k, temperature)
    sizes = [int(rows) for rows in of_ranks["number of rows"]]
    x = features if replicated else gather_rows(features, sizes, group)
    with torch.autocast(features.device.type, enabled=False):
        tops = top_classes(
            x, weight, bias, shard, k=k, temperature=temperature, chunk=chunk_size(x, k, chunk),
            dtype=product_dtype(features),
        )  # fmt: skip
    return TopClasses(*(t if replicated else t.split(sizes)[dist.get_rank(group)] for t in tops))


class Placed(NamedTuple):
    """This rank's part of a linear layer, and the process group whose ranks hold the other parts."""

    group: Group
    weight: Tensor
    bias: Tensor | None


def placed(weight: Any, bias: Any, features: Any = None) -> Placed:
    """Return this rank's part of a DTensor weight [n, d] and bias, sharded by class over one dimension of their mesh.

    Along the other dimensions of the mesh the part is copied, and the copies get the mean of their gradients. If
    ``features`` are a DTensor whose rows are sharded along such a dimension, the copies get the sum.
    """
    mesh, dimension = weight.device_mesh, _class_dimension(weight, bias)
    summed = [features is not None and p.is_shard() for p in (weight if features is None else features).placements]

    def local(t: Any) -> Any:
        part = None if t is None else t.to_local()
        for other, size in enumerate(mesh.shape):
            if part is not None and other != dimension and size > 1:
                part = SameOnAllRanks.apply(part, mesh.get_group(other), 1.0 if summed[other] else 1 / size)
        return part

    return Placed(mesh.get_group(dimension), local(weight), local(bias))


def _class_dimension(weight: Any, bias: Any) -> int:
    from torch.distributed.tensor import Replicate, Shard

    dimensions = [place for place, p in enumerate(weight.placements) if p == Shard(0)]
    rest = [p for place, p in enumerate(weight.placements) if place not in dimensions]
    if len(dimensions) != 1 or any(p != Replicate() for p in rest):
        raise ValueError(
            "a DTensor weight must have its classes, dimension 0, sharded over one dimension of the mesh and be "
            f"replicated over the others, got {weight.placements}"
        )
    if bias is not None and (not is_distributed(bias) or bias.placements != weight.placements):
        given = bias.placements if is_distributed(bias) else "a plain tensor"
        raise ValueError(f"bias must lie as the weight does, {weight.placements}, got {given}")
    return dimensions[0]


@outside_graphs
def loss_of_dtensors(
    features: Any,
    weight: Any,
    bias: Any,
    target: Any,
    *,
    reduction: str,
    num_classes: int | None,
    averaged: bool,
    replicated: bool,
    **options: Any,
) -> Tensor:
    """Compute :func:`spread_loss` for a DTensor weight; features are this rank's plain rows, or a DTensor."""
    n = len(weight)
    if num_classes not in (None, n):
        raise ValueError(f"weight has {n} rows, num_classes is {num_classes}")
    options["num_classes"] = n
    plain = not is_distributed(features)
    layer = placed(weight, bias, None if plain else features)
    if plain:
        return spread_loss(
            features, layer.weight, layer.bias, target, **options, reduction=reduction, group=layer.group,
            averaged=averaged, replicated=replicated,
        )  # fmt: skip

    def rows(x: Tensor, *parts: Any) -> Tensor:
        own = LabelMixture(*parts) if isinstance(target, LabelMixture) else parts[0]
        return spread_loss(
            x, layer.weight, layer.bias, own, **options, reduction="none", group=layer.group, averaged=False,
            replicated=True, summed=False,
        )  # fmt: skip

    parts = target if isinstance(target, LabelMixture) else (target,)
    value = by_rows_of_layer(rows, features, weight.device_mesh, _class_dimension(weight, bias), *parts)
    if reduction == "none":
        return value
    if reduction == "sum" or isinstance(target, LabelMixture) or target.is_floating_point():
        return value.sum() if reduction == "sum" else value.mean()
    masses = Masses.of(whole(target), n, weight=options["class_weight"], ignore_index=options["ignore_index"])
    assert masses.counts is not None, "indices that nobody looked at may be ignored"
    return value.sum() / masses.counts.sum().to(value.dtype)


def check_rows(features: Tensor, target: Tensor | LabelMixture, n: int | None, ignore_index: int) -> dict[str, float]:
    """Raise unless the target fits the features [B, d] and, if n is known, n classes; return no facts to compare."""
    if n is not None:
        check_target(features.new_zeros(()).expand(len(features), n), target, ignore_index=ignore_index, look=True)
    elif isinstance(target, LabelMixture):
        target.check(len(features))
    return {}


def check_classes(n: int | None, alpha: float | Tensor, class_weight: Tensor | None) -> None:
    """Raise unless options with one number for each class have the shape [n]; check nothing while n is unknown."""
    if n is None:
        return
    if isinstance(alpha, Tensor) and alpha.shape not in ((), (n,)):
        raise ValueError(f"alpha must be one number, or one a class [{n}], got {list(alpha.shape)}")
    if class_weight is not None and class_weight.shape != (n,):
        raise ValueError(f"class_weight must be one factor a class [{n}], got {list(class_weight.shape)}")


def check_options(tau: float, alpha: float | Tensor, reduction: str, label_smoothing: float) -> None:
    """Raise unless the options are in range; values of tensors are not read, as that would wait for a GPU."""
    number(tau, "tau", above=0)
    if not isinstance(alpha, Tensor):
        number(alpha, "alpha", at_least=0)
    Reduction.of(reduction)
    number(label_smoothing, "label_smoothing", at_least=0, at_most=1)


def check_sample(sample: float | None, target: Tensor | LabelMixture, label_smoothing: float) -> None:
    if sample is None:
        return
    if not 0.0 < sample <= 1.0:
        raise ValueError(f"sample must be above 0 and at most 1, got {sample!r}")
    spread = target.uniform is not None if isinstance(target, LabelMixture) else target.is_floating_point()
    if spread or label_smoothing:
        raise ValueError("sample needs targets that are labels: a distribution has mass on classes that are not drawn")


def sampled(
    shard: Shard, weight: Tensor, bias: Tensor | None, labels: Tensor, rate: float, theta: float,
    generator: torch.Generator | None,
) -> tuple[Shard, Tensor, Tensor]:  # fmt: skip
    """Return the shard, the rows of the weight and the bias for the classes that take part in a step.

    Labels of the batch always take part. The scores of other classes that were drawn are raised by theta log(1 / rate),
    so that their odds also stand for the odds of classes that were not drawn.
    """
    own = shard.local(labels).flatten()
    taken = drawn(shard, rate, generator, weight.device)
    certain = torch.zeros(shard.size + 1, dtype=torch.bool, device=weight.device).index_fill_(0, own, True)[:-1]
    places = (taken | certain).nonzero()[:, 0]
    shift = torch.where(certain[places], 0.0, -theta * math.log(rate)).to(weight.dtype)
    return shard._replace(drawn=places), weight[places], shift if bias is None else bias[places] + shift


def drawn(shard: Shard, rate: float, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw each class of this rank with probability ``rate``, independently of other classes and ranks: bool [m]."""
    rank = 0 if shard.group is None else dist.get_rank(shard.group)
    on = "cpu" if generator is None else generator.device
    # ranks that start from the same seed must not draw alike
    seed = int(torch.randint(2**62, (), generator=generator, device=on)) + rank * 0x9E3779B97F4A7C15
    own = torch.Generator(device).manual_seed(seed % 2**63)
    return torch.rand(shard.size, generator=own, device=device) < rate


def own_classes(n: int, group: Group) -> int:
    """Return how many of n classes this rank holds."""
    return layout(n, dist.get_world_size(group))[dist.get_rank(group)]


def _facts(features: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> dict[str, float]:
    logits_like(features, weight, bias)
    return {
        "number of rows": len(features),
        "features": features.shape[1],
        "classes of a rank": len(weight),
        "k": k,
        "dtype": DTYPES.index(product_dtype(features)),
    }


def gathered(target: Tensor | LabelMixture, sizes: list[int], shard: Shard) -> Tensor | LabelMixture:
    """Gather the targets of all ranks' rows; of distributions, only the columns of this rank's classes."""
    if isinstance(target, LabelMixture):
        shares = target.shares if target.uniform is None else torch.cat((target.shares, target.uniform[:, None]), 1)
        labels, shares = (gather_rows(part, sizes, shard.group) for part in (target.labels, shares))
        m = labels.shape[1]
        return LabelMixture(labels, shares[:, :m], None if target.uniform is None else shares[:, m])
    if target.is_floating_point():
        most = layout(shard.n, len(sizes))[0]
        return columns_of_all_rows(target, sizes, most, shard.group)[:, : shard.size]
    return gather_rows(target.long(), sizes, shard.group)
