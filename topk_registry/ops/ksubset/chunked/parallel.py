"""Losses of rows whose classes lie on the ranks of a process group.

Ranks hold ceil(n / ranks) classes each, as torch's DTensor lays them; the last ones hold what is left, or nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset.api import topk_marginals
from topk_registry.ops.ksubset.chunked.layer import LayerUpdate, check_scores, chunks_of, own_state, problem
from topk_registry.ops.ksubset.chunked.shards import LabelMargins, exchange
from topk_registry.ops.ksubset.chunked.soft_targets import Costs, ExpectedHinge
from topk_registry.ops.ksubset.request import check, output_dtype
from topk_registry.ops.ksubset.torch.state import top_margins
from topk_registry.ops.process_group import Group, agreed, all_gather, outside_graphs
from topk_registry.ops.targets.checks import check_device, check_range
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses, Reduction
from topk_registry.ops.values import number

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FACTS = ("number of rows", "features", "classes of a rank", "num_classes", "k", "dtype", "labels", "tau", "alpha",
         "class_weight", "temperature", "reduction", "label_smoothing", "ignore_index", "sample")  # fmt: skip


class Shard(NamedTuple):
    """The classes of this rank."""

    group: Group | None
    n: int  # classes of all ranks
    first: int
    size: int
    drawn: Tensor | None = None  # places of the classes that take part, of this rank's; None for all

    def local(self, label: Tensor) -> Tensor:
        """Labels counted from this rank's first class, and -1 for those of other ranks."""
        label = label - self.first
        place = torch.where((label >= 0) & (label < self.size), label, -1)
        if self.drawn is None or not self.size:
            return place
        new = place.new_full((self.size,), -1)
        new[self.drawn] = torch.arange(len(self.drawn), device=new.device)
        return torch.where(place >= 0, new[place.clamp(min=0)], -1)

    def part(self, of_classes: Tensor) -> Tensor:
        """This rank's part of one number a class [n]; one number for all stays as it is."""
        if not of_classes.ndim:
            return of_classes
        own = of_classes[self.first : self.first + self.size]
        return own if self.drawn is None else own[self.drawn]


def layout(n: int, ranks: int) -> list[int]:
    """Number of the n classes that each rank holds.

    Example:
        >>> layout(9, 4)
        [3, 3, 3, 0]
    """
    most = -(-n // ranks)
    return [max(0, min(most, n - most * rank)) for rank in range(ranks)]


def shard_of(sizes: Sequence[float], n: int | None, group: Group) -> Shard:
    """This rank's shard, from the number of classes on each rank; raises unless they make up ``n`` as they should."""
    held = [int(size) for size in sizes]
    n = sum(held) if n is None else n
    wanted = layout(n, len(held))
    if held != wanted:
        raise ValueError(
            f"{n} classes on {len(held)} ranks lie as {wanted} (ceil(n / ranks) on each, the last ones what is left), "
            f"got {held}, {sum(held)} in all"
        )
    rank = dist.get_rank(group)
    return Shard(group, n, sum(held[:rank]), held[rank])


def describe(target: Tensor | LabelMixture) -> int:
    """A number for the kind of a target, which all ranks must agree on."""
    if isinstance(target, LabelMixture):
        return 2 + 2 * target.labels.shape[1] + (target.uniform is not None)
    return 1 if target.is_floating_point() else 0


def row_losses(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor | LabelMixture,
    shard: Shard,
    *,
    k: int,
    tau: float,
    alpha: Tensor,
    class_weight: Tensor | None,
    chunk: int,
    dtype: torch.dtype,
    update: LayerUpdate | None = None,
) -> Tensor:
    """The loss of every row [B], the same on all ranks, from a layer's part or from this rank's scores [B, m].

    Backward passes hand the gradients of weight and bias to ``update``, a chunk at a time, where there is one. Labels
    count over the classes of all ranks; a distribution is this rank's part of it [B, m].
    """
    wide = output_dtype(x.new_empty(0, dtype=dtype))
    if isinstance(target, Tensor) and not target.is_floating_point():
        target = LabelMixture.smoothed(target, 0.0)
    p = problem(x.new_empty(0, dtype=dtype), shard.n, k, k * tau, shard.group, chunk, dtype, update)
    if isinstance(target, LabelMixture) and target.uniform is None and target.labels.shape[1] == 1:
        label, share = target.labels[:, 0], target.shares[:, 0]
        margin, top = LabelMargins.apply(x, weight, bias, shard.local(label), p)
        check_scores(margin.detach(), top[:, p.k - 1], k, p.sign)
        loss = soft_hinge((alpha[label] if alpha.ndim else alpha).to(margin) - margin / k, tau)
        loss = loss * share if class_weight is None else loss * share * class_weight[label]
        return loss.masked_fill((share == 0) & ~loss.isfinite(), 0.0).to(wide)
    if isinstance(target, LabelMixture):
        target = target._replace(labels=shard.local(target.labels))
    factor = None if class_weight is None else shard.part(class_weight).to(p.like)
    costs = Costs(shard.part(alpha).to(p.like), factor, tau, k)
    return ExpectedHinge.apply(x, weight, bias, target, costs, p).to(wide)


@outside_graphs
def sharded_hinge(
    logits: Tensor,
    target: Tensor | LabelMixture,
    k: int,
    *,
    tau: float,
    alpha: float | Tensor,
    weight: Tensor | None,
    reduction: str,
    group: Group,
    num_classes: int | None,
) -> Tensor:
    """``smooth_topk_hinge`` for this rank's columns [B, m] of the logits; every rank has all rows."""

    def facts() -> dict[str, float]:
        if logits.ndim != 2 or not logits.is_floating_point():
            raise ValueError(f"logits must be floating point [B, m], got {logits.dtype} {list(logits.shape)}")
        number(tau, "tau", above=0)
        return {
            "number of rows": len(logits),
            "classes of a rank": logits.shape[1],
            "num_classes": num_classes or -1,
            "k": k,
            "dtype": DTYPES.index(logits.dtype),
            "labels": describe(target),
            "tau": tau,
            "alpha": alpha.numel() + 0.5 if isinstance(alpha, Tensor) else alpha,
            "class_weight": 0 if weight is None else weight.numel(),
            "reduction": Reduction.of(reduction),
        }

    of_ranks = agreed(facts, FACTS, group, logits.device, may_differ=("classes of a rank",))
    shard = shard_of(of_ranks["classes of a rank"], num_classes, group)
    check(logits.new_empty(0, shard.n), k, tau)
    alpha = torch.as_tensor(alpha, dtype=output_dtype(logits), device=logits.device).detach()
    agreed(lambda: _checked(logits, target, alpha, weight, shard), (), group, logits.device)
    if isinstance(target, Tensor) and target.is_floating_point():
        target = target if target.shape == logits.shape else target[:, shard.first : shard.first + shard.size]
    masses = Masses.of(target, shard.n, weight=weight, ignore_index=None)
    options = {"k": k, "tau": tau, "alpha": alpha, "class_weight": weight, "chunk": shard.n, "dtype": logits.dtype}
    return masses.reduced(row_losses(logits, None, None, masses.target, shard, **options), reduction)


def _checked(logits: Tensor, target: Tensor | LabelMixture, alpha: Tensor, weight: Tensor | None, shard: Shard) -> dict:
    B, n = len(logits), shard.n
    check_device(logits, "target", target)
    labels = target.labels if isinstance(target, LabelMixture) else target
    if labels.is_floating_point():
        if labels.shape not in (logits.shape, (B, n)):
            raise ValueError(
                f"a distribution must be [{B}, {n}], or as the logits {list(logits.shape)}, got {list(labels.shape)}"
            )
    elif labels.dtype != torch.int64 or len(labels) != B:
        raise ValueError(f"labels must be int64 [{B}], got {labels.dtype} {list(labels.shape)}")
    else:
        check_range(labels, n, name="label")
    for name, given in (("alpha", alpha), ("weight", weight)):
        if given is not None and given.shape not in ((n,), () if name == "alpha" else (n,)):
            raise ValueError(f"{name} must be one number a class of all ranks [{n}], got {list(given.shape)}")
    return {}


@torch.no_grad()
def top_classes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shard: Shard,
    *,
    k: int,
    temperature: float,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest classes of every row with logits and marginals, each [B, k], the same on all ranks."""
    p = problem(x.new_empty(0, dtype=dtype), shard.n, k, temperature, shard.group, chunk, dtype)
    if p.sign < 0 or shard.n <= 2 * k + 2:  # the top group would be all classes
        most = layout(shard.n, dist.get_world_size(shard.group))[0]
        scores = p.like.new_full((len(x), most), -torch.inf)
        for first, _, _, s in chunks_of(x, weight, bias, p):
            scores[:, first : first + s.shape[1]] = s * p.sign
        logits = all_gather(scores, shard.group, "gathering logits").transpose(0, 1).flatten(1)[:, : shard.n]
        marginals = topk_marginals(logits, k, temperature=temperature)
        top, indices = logits.topk(k)
        return indices, top.to(dtype), marginals.gather(1, indices)
    state, _ = exchange(own_state(x, weight, bias, k + 1, p), None, k + 1, p, len(x), shard.first)
    marginals = torch.sigmoid(top_margins(state, p.theta) / p.theta)
    return state.classes[:, :k], state.top[:, :k].to(dtype), marginals.to(output_dtype(p.like))
