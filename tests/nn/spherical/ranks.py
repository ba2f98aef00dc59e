"""Several processes, each with its own part of the batch, make the step that one process makes with all of it.

``tests/test_two_ranks.py`` starts the processes.
"""

import torch
from torch import distributed as dist
from torch import nn

from topk_registry.nn.spherical import SphericalLinear

N = 60
D = 5
STEPS = 5


def make():
    torch.manual_seed(0)
    return SphericalLinear.from_linear(nn.Linear(D, N, dtype=torch.float64), loss="log_taylor_softmax")


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(6, D, dtype=torch.float64, generator=generator), torch.randint(N, (6,), generator=generator)


def work(folder):
    """Train a layer, and write its weights into a folder."""
    rank = dist.get_rank()
    layer = make()
    for step, (features, target) in enumerate(batches()):
        mine = slice(3 * rank, 3 * rank + 3)
        if step == 2 and rank == 0:  # a rank with two micro-batches, and one with two labels a row
            for part in (slice(0, 2), slice(2, 3)):
                (layer(features[part], target[part]) * (part.stop - part.start) / 3).backward()
        elif step == 2:
            labels = target[mine, None].expand(3, 2)
            layer(features[mine], (labels, torch.full((3, 2), 0.5, dtype=torch.float64))).backward()
        elif step == 1 and rank == 1:  # all but one row of a rank are ignored
            layer(features[mine], torch.where(torch.arange(3) == 1, target[mine], -100)).backward()
        elif step < 3 or rank == 0:  # in the step after it the second rank has nothing
            layer(features[mine], target[mine]).backward()
        if step == 4:  # no rank has a row that counts: what is left is the decay
            layer.zero_grad()
            layer(features[mine], torch.full((3,), -100)).backward()
        layer.step(0.3, weight_decay=0.1, max_norm=1.0)
    torch.save(layer.to_linear().state_dict(), folder / f"weights-{rank}.pt")


def check_weights(folder):
    """Compare the weights that the processes wrote into a folder with those of one process."""
    one = make()
    for step, (features, target) in enumerate(batches()):
        if step == 1:
            (one(features[:3], target[:3]) / 2).backward()
            (one(features[4:5], target[4:5]) / 2).backward()
        elif step < 3:
            one(features, target).backward()
        elif step == 4:
            one(features[:0], target[:0]).backward()
        else:
            (one(features[:3], target[:3]) / 2).backward()  # the mean over ranks, one being 0
        one.step(0.3, weight_decay=0.1, max_norm=1.0)
    first, second = (torch.load(folder / f"weights-{rank}.pt") for rank in (0, 1))
    for name, wanted in one.to_linear().state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], wanted, rtol=1e-11, atol=1e-12)
