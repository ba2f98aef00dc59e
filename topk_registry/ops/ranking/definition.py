"""The loss over relaxed rankings in torch operations; see README.md."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from topk_registry.ops.ranking.relaxations import NETWORKS, log_chances, network, rank_logits
from topk_registry.ops.targets.table import nan_where_broken, of_table, wide

ROWS = 1 << 14  # rows of candidates at a time, where a network ranks every class of every row as its label
LEAST = -1e30  # in place of -inf, whose difference with itself is NaN


class Ranking(NamedTuple):
    """A relaxed ranking, and what each of its ranks counts: the options of :func:`ranked`."""

    weights: tuple[float, ...]  # of softmax, then of ranks 1, 2, ...
    k: int  # at least k + 1 scores must be above -inf
    relaxation: str
    tau: float
    swap: str
    candidates: int | None

    @classmethod
    def of_sizes(
        cls,
        sizes: Sequence[int],
        shares: Sequence[float],
        relaxation: str,
        tau: float,
        swap: str,
        candidates: int | None,
        softmax: bool,
    ) -> "Ranking":
        """Equation 1: rank r counts the shares of all k_j that are at least r."""
        ranked = [(k, share) for k, share in zip(sizes, shares, strict=True) if k > 1 or not softmax]
        first = sum(share for k, share in zip(sizes, shares, strict=True) if k == 1 and softmax)
        most = max((k for k, _ in ranked), default=0)
        ranks = (sum(share for k, share in ranked if k >= r) for r in range(1, most + 1))
        return cls((float(first), *map(float, ranks)), max(sizes), relaxation, float(tau), swap, candidates)

    @property
    def ranks(self) -> int:
        """Number of ranks that count."""
        return len(self.weights) - 1


def ranked(ranking: Ranking, scores: Tensor, target: Tensor | None) -> Tensor:
    """The losses of :func:`topk_registry.ops.ranking.api.ranking_rows`."""
    s = wide(scores)
    every = ranking.candidates is None or ranking.candidates >= s.shape[1]
    if target is not None and not target.is_floating_point():
        # what a network makes of scores depends on their order, and all of them keep their own
        of_label = _of_network if every and ranking.relaxation in NETWORKS else _of_label
        return nan_where_broken(of_label(ranking, s, target), s)
    if ranking.relaxation in NETWORKS:
        table = _network_of_all(ranking, s) if every else _networks(ranking, s)
    else:
        table = _table(ranking, s)
    return of_table(nan_where_broken(table, s), target)


def _mixture(ranking: Ranking, softmax: Tensor, ranks: Tensor) -> Tensor:
    """-log sum_r W_r P_r [...] of log P of softmax [...] and of the ranks [R, ...]: equation 1."""
    terms = torch.cat((softmax[None], ranks)) if ranking.weights[0] else ranks
    weights = [weight for weight in ranking.weights if weight]
    shares = torch.cat([terms.new_full((1,), math.log(weight)) for weight in weights])  # nothing comes from the host
    return -(terms + shares.view(-1, *(1 for _ in softmax.shape))).logsumexp(0)


def _of_label(ranking: Ranking, s: Tensor, label: Tensor) -> Tensor:
    own = s.gather(1, label[:, None])
    m = min(ranking.candidates or s.shape[1], s.shape[1])
    rivals = s.scatter(1, label[:, None], -torch.inf).topk(m - 1, dim=1).values
    candidates = torch.cat((own, rivals), 1)
    if ranking.relaxation in NETWORKS:
        return _of_network(ranking, candidates, torch.zeros_like(label))
    loss = _of_candidates(ranking, candidates)[:, 0]
    return torch.where(own[:, 0] == -torch.inf, torch.inf, loss)


def _of_candidates(ranking: Ranking, s: Tensor) -> Tensor:
    """The losses [B, m] of candidates [B, m], each as the label, by one ranking of all."""
    kept = s > -torch.inf
    ranks = rank_logits(s / ranking.tau, ranking.ranks, ranking.relaxation).log_softmax(-1)
    softmax = torch.where(kept, s, LEAST).log_softmax(-1)
    return _checked(ranking, kept, _mixture(ranking, softmax, ranks.movedim(1, 0)))


def _checked(ranking: Ranking, kept: Tensor, loss: Tensor) -> Tensor:
    """NaN where all but k scores or fewer are ruled out, as no set of k can leave one out."""
    return torch.where(kept.sum(-1, keepdim=True) > ranking.k, loss, torch.nan)


def _table(ranking: Ranking, s: Tensor) -> Tensor:
    """The losses [B, n] of every class.

    The highest m classes are ranked among themselves. Every other class is the lowest of its candidates, so that its
    ranks follow from one ranking of the m - 1 highest, by equations 4 and 5.
    """
    m = min(ranking.candidates or s.shape[1], s.shape[1])
    top = s.topk(m, dim=1)
    inside = _of_candidates(ranking, top.values)
    if m < s.shape[1]:
        table = _of_lowest(ranking, s, top.values[:, :-1]).scatter(1, top.indices, inside)
    else:
        table = torch.zeros_like(s).scatter(1, top.indices, inside)
    return torch.where(s == -torch.inf, torch.inf, table)


def _of_lowest(ranking: Ranking, s: Tensor, rivals: Tensor) -> Tensor:
    """The losses [B, n] of classes that are below all rivals [B, m - 1]; what it says of others means nothing."""
    kept = rivals > -torch.inf
    low = torch.where(kept, rivals, torch.inf).amin(-1, keepdim=True)
    low = torch.where(low < torch.inf, low, 0.0)
    below = torch.where(s > -torch.inf, low - s, 0.0).clamp(min=0.0) / ranking.tau
    offsets, slopes = lowest(ranking, rivals, low)
    violations = offsets[..., None] + slopes[:, None, None] * below
    logs = -F.softplus(violations, threshold=40.0)
    return _mixture(ranking, logs[0], logs[1:])


def lowest(ranking: Ranking, rivals: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """t [R + 1, B] and its slope [R + 1]: a class d below ``low``, the least of the rivals [B, m - 1], has the log-odds
    -(t + slope d) in softmax, and the same of each rank, by equations 4 and 5."""
    kept, m = rivals > -torch.inf, rivals.shape[1] + 1
    x = torch.where(kept, rivals - low, 0.0) / ranking.tau
    softmax = torch.where(kept, ranking.tau * x, LEAST).logsumexp(-1, keepdim=True)
    norms = rank_logits(torch.where(kept, x, -torch.inf), ranking.ranks, ranking.relaxation).logsumexp(-1)
    if ranking.relaxation == "neuralsort":
        offsets, slopes = norms + x.sum(-1, keepdim=True), [2 * (m - r) - 1 for r in range(1, ranking.ranks + 1)]
    else:
        offsets, slopes = norms + x[:, : ranking.ranks], [1] * ranking.ranks
    return torch.cat((softmax, offsets), 1).T, x.new_tensor([ranking.tau, *slopes])


def _of_network(ranking: Ranking, s: Tensor, label: Tensor) -> Tensor:
    """The losses [B] of labels among the candidates [B, m], in the order that the network is given them."""
    kept = s > -torch.inf
    own = label[:, None]
    column = torch.zeros_like(s).scatter(1, own, 1.0)[:, :, None]  # vmap takes no one_hot
    chances = network(s / ranking.tau, column, ranking.relaxation, ranking.swap)[:, : ranking.ranks, 0]
    softmax = torch.where(kept, s, LEAST).log_softmax(-1).gather(1, own)[:, 0]
    loss = _mixture(ranking, softmax, log_chances(chances).T)
    return torch.where(s.gather(1, own)[:, 0] == -torch.inf, torch.inf, loss)


def _network_of_all(ranking: Ranking, s: Tensor) -> Tensor:
    """The losses [B, n] of every class, where the network ranks all in their own order."""
    every = torch.eye(s.shape[1]).to(s).expand(len(s), -1, -1)
    chances = network(s / ranking.tau, every, ranking.relaxation, ranking.swap)[:, : ranking.ranks]
    return _mixture(ranking, s.log_softmax(-1), log_chances(chances).movedim(1, 0))


def _networks(ranking: Ranking, s: Tensor) -> Tensor:
    """The losses [B, n] of every class by a network each: it is given the label first, so no two share one."""
    blocks = s.split(max(1, ROWS // s.shape[1]))
    if len(blocks) == 1:
        return _networks_of(ranking, s)
    # computed again in the backward pass, as the networks of every class would not fit into memory
    return torch.cat([checkpoint(_networks_of, ranking, rows, use_reentrant=False) for rows in blocks])


def _networks_of(ranking: Ranking, s: Tensor) -> Tensor:
    B, n = s.shape
    label = torch.arange(n, device=s.device).repeat(B)
    return _of_label(ranking, s.repeat_interleave(n, 0), label).view(B, n)
