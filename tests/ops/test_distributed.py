"""Operators and losses on DTensors give what they give on the whole batch: on one rank, and on two."""

import pytest
import torch
import torch.distributed as dist

from tests.workers import processes
from topk_registry import create_loss
from topk_registry.functional import perturbed_topk, topk_label_margins, topk_marginals
from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.targets.label_mixture import LabelMixture

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

B, N = 7, 12  # rows do not divide evenly over two ranks


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


NOISE, LABEL, WEIGHT = randn(4, B, N, seed=1), torch.arange(B), torch.linspace(1, 2, N)
Q = randn(B, N, seed=2).softmax(1)
ROWS = {
    "margins": lambda s, y: topk_marginals(s, 3),
    "label_margins": lambda s, y: topk_label_margins(s, y, 3),
    "hinge": lambda s, y: smooth_topk_hinge(s, y, 3, tau=0.5, alpha=WEIGHT),
    "weighted": lambda s, y: smooth_topk_hinge(s, y, 3, weight=WEIGHT, reduction="mean"),
    "distribution": lambda s, y: smooth_topk_hinge(s, Q, 3, reduction="mean"),
    "mixture": lambda s, y: smooth_topk_hinge(s, LabelMixture.smoothed(LABEL, 0.1), 3, reduction="sum"),
    "perturbed": lambda s, y: perturbed_topk(s, 3, noise=NOISE, num_samples=4),
}


def value_and_gradient(f, s, y):
    value = f(s, y)
    (gradient,) = torch.autograd.grad(value.sum(), s)
    return value.detach(), gradient


def compare(mesh):
    """Raise unless every function gives the same on DTensors of every placement."""
    s = randn(B, N)
    for name, f in ROWS.items():
        wanted = value_and_gradient(f, s.clone().requires_grad_(), LABEL)
        for placement in (Shard(0), Shard(1), Replicate()):
            spread = distribute_tensor(s, mesh, [placement]).requires_grad_()
            for y in (LABEL, distribute_tensor(LABEL, mesh, [Shard(0)]), distribute_tensor(LABEL, mesh, [Replicate()])):
                for found, right in zip(value_and_gradient(f, spread, y), wanted, strict=True):
                    whole = found.full_tensor()
                    torch.testing.assert_close(whole, right, msg=lambda m, n=name, p=placement: f"{n} {p}: {m}")
    spread = distribute_tensor(torch.zeros(64, N), mesh, [Shard(0)])
    noisy = perturbed_topk(spread, 3, num_samples=2).full_tensor()
    assert len(noisy.unique()) == 64, "rows of different ranks share their noise"
    loss = create_loss("noised_topk", k=3, num_samples=2, reduction="none")
    spread = distribute_tensor(torch.zeros(64, N), mesh, [Shard(0)])
    label = distribute_tensor(torch.zeros(64, dtype=torch.int64), mesh, [Shard(0)])
    torch.manual_seed(0)  # as trainers do on every rank
    noisy = loss(spread, label).full_tensor()
    assert len(noisy.unique()) == 64, "rows of different ranks share their noise in the loss"


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_on_one_rank(mesh):
    compare(mesh)


def of_rank(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    compare(init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()


@pytest.mark.slow
def test_on_two_ranks(tmp_path):
    context = processes()
    ranks = [context.Process(target=of_rank, args=(rank, str(tmp_path / "store"))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("name", ["smooth_topk_svm", "topk_nll", "noised_topk"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_losses(mesh, name, placement):
    s, loss = randn(B, N), create_loss(name, k=3)
    spread = distribute_tensor(s, mesh, [placement]).requires_grad_()
    label = distribute_tensor(LABEL, mesh, [Shard(0)])
    value, gradient = value_and_gradient(lambda s, y: loss(s, y).mean(), spread, label)
    assert value.full_tensor().isfinite()
    if name != "noised_topk":  # whose noise is another
        wanted = value_and_gradient(loss, s.requires_grad_(), LABEL)
        torch.testing.assert_close((value.full_tensor(), gradient.full_tensor()), wanted)
    assert gradient.full_tensor().sum(1).abs().max() < 1e-5  # a common shift changes nothing
