"""Gather the batches of all processes, so that each makes the same step."""

import torch
import torch.distributed as dist
from torch import Tensor

from topk_registry.nn.spherical.factors import Batch, FactoredWeight


def gathered(own: Batch | None, factors: FactoredWeight) -> Batch | None:
    """The batch of all ranks, its loss divided by their number; this rank's own where there is one process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return own
    device, world = factors.V.device, dist.get_world_size()
    shape = torch.tensor([0, 0] if own is None else own.labels.shape, device=device)
    shapes = [torch.zeros_like(shape) for _ in range(world)]
    dist.all_gather(shapes, shape)
    m, K = (int(bound) for bound in torch.stack(shapes).amax(0))
    if K == 0 and m == 0:  # no rank has had a backward pass
        return None
    d = factors.Q.shape[0]
    mine = torch.zeros(m, 3 * d + 3 + 2 * K, dtype=torch.float64, device=device)
    if own is not None:
        rows = _packed(own, K)
        mine[: len(rows)] = rows
    parts = [torch.zeros_like(mine) for _ in range(world)]
    if m:
        dist.all_gather(parts, mine)
    rows = torch.cat([part[: int(count[0])] for part, count in zip(parts, shapes, strict=True)])
    H, HQ, dH, s, gs, gq, labels, ga = rows.split([d, d, d, 1, 1, 1, K, K], 1)
    return Batch(H, HQ, s[:, 0], labels.long(), gs[:, 0], gq[:, 0], ga, dH).scaled(1 / world)


def _packed(x: Batch, K: int) -> Tensor:
    """One matrix of a batch; labels are exact in double precision up to 2^53."""
    pad = (0, K - x.labels.shape[1])
    labels, ga = (torch.nn.functional.pad(value.double(), pad) for value in (x.labels, x.ga))
    return torch.cat((x.H, x.HQ, x.dH, x.s[:, None], x.gs[:, None], x.gq[:, None], labels, ga), 1)
