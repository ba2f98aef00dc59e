"""Places of labels among the scores of a classifier, and their likelihood; its classes may be spread over ranks.

Top-k accuracy for every k needs two counts a row, the scores above the label's and those equal to it. They are sums
over chunks of classes, and over ranks, so the scores of all classes are never made.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from topk_registry.ops.ksubset import request
from topk_registry.ops.ksubset.chunked.api import chunk_size, product_dtype
from topk_registry.ops.ksubset.chunked.layer import score_chunks
from topk_registry.ops.process_group import Group, all_gather, all_reduce, gather_rows


class Places(NamedTuple):
    """Where the labels [B] of this rank's rows stand among the scores of all classes."""

    above: Tensor  # [B], int64: scores above the label's, or NaN
    tied: Tensor  # [B], int64: scores equal to the label's, its own among them
    log_likelihood: Tensor  # [B], in double precision: log softmax at the label


@torch.no_grad()
def label_places(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    label: Tensor,
    *,
    first: int = 0,
    group: Group = None,
    chunk: int | None = None,
) -> Places:
    """Find the labels [B] among the scores ``F.linear(features, weight, bias)``.

    Args:
        features: [B, d], this rank's rows.
        weight: [m, d], the rows of this rank's classes.
        bias: [m] or None.
        label: int64 [B], counted over the classes of all ranks.
        first: this rank's first class.
        group: process group whose ranks hold the classes; all of them must call this. None: one process holds all.
        chunk: number of classes at a time; None chooses for speed.

    Example:
        >>> label_places(torch.eye(2), torch.eye(2), None, torch.tensor([0, 0])).above
        tensor([0, 1])
    """
    dtype = product_dtype(features)
    like = features.new_empty(0, dtype=request.output_dtype(features.new_empty(0, dtype=dtype)))
    sizes = _sizes(len(features), group, features.device)
    if group is not None:
        features, label = gather_rows(features, sizes, group), gather_rows(label, sizes, group)
    local, x = label - first, features.to(dtype)
    chunk = chunk_size(x, 1, chunk)
    with torch.autocast(x.device.type, enabled=False):
        own = like.new_full(label.shape, -torch.inf)
        total = own.double()
        for start, _, _, s in score_chunks(x, weight, bias, chunk, like):
            here = (local >= start) & (local < start + s.shape[1])
            place = (local - start).clamp(0, s.shape[1] - 1)
            own = torch.where(here, s.gather(1, place[:, None])[:, 0], own)
            total = torch.logaddexp(total, s.logsumexp(1).double())
        if group is not None:
            seen = all_gather(torch.stack((own.double(), total)), group, "gathering scores of labels")
            own, total = seen[:, 0].amax(0).to(own), seen[:, 1].logsumexp(0)
        counts = torch.zeros(2, len(label), dtype=torch.int64, device=x.device)
        for _, _, _, s in score_chunks(x, weight, bias, chunk, like):
            counts[0] += (~(s <= own[:, None])).sum(1)
            counts[1] += (s == own[:, None]).sum(1)
        if group is not None:
            all_reduce(counts, group, "adding places of labels")
    places = Places(counts[0], counts[1], own.double() - total)
    return places if group is None else Places(*(part.split(sizes)[dist.get_rank(group)] for part in places))


def _sizes(rows: int, group: Group, device: torch.device) -> Sequence[int]:
    """Return the number of rows of every rank."""
    if group is None:
        return [rows]
    return all_gather(torch.tensor([rows], device=device), group, "counting rows")[:, 0].tolist()
