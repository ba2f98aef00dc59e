"""Each collective over two ranks. All checks share one start of the processes, so that they fit into the default level.

The checks of losses, layers and metrics stand beside the other tests of these, and are only called here.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.losses import test_batch
from tests.metrics import test_metrics
from tests.nn import test_linear_ranks
from tests.nn.spherical import ranks as spherical
from topk_registry.errors import TrainError
from topk_registry.ops.distributed import (
    OwnRows,
    agreed,
    all_gather,
    all_reduce,
    gather_rows,
    mean_of_ranks,
    number_of_ranks,
)
from topk_registry.train import checkpoint
from topk_registry.train.model import Compute
from topk_registry.train.run import Run

CHECKS = ranks.Checks(test_batch.CHECKS | test_metrics.CHECKS)
CHECKS.add(test_linear_ranks.losses_and_gradients)
CHECKS.add(test_linear_ranks.predictions)
WORLD, SIZES = None, (2, 1)  # rows of each rank


@CHECKS.add
def all_gather_stacks_in_the_order_of_ranks():
    rank = dist.get_rank()
    mine = torch.arange(6.0).view(2, 3).T + 10 * rank  # not contiguous
    expected = torch.stack([torch.arange(6.0).view(2, 3).T + 10 * each for each in range(2)])
    assert torch.equal(all_gather(mine, WORLD), expected)
    assert torch.equal(all_gather(torch.tensor(rank), WORLD), torch.tensor([0, 1]))
    assert all_gather(torch.zeros(0, 3), WORLD).shape == (2, 0, 3)


@CHECKS.add
def all_reduce_sums_and_leaves_its_argument_alone():
    mine = torch.tensor([1.0, 2.0]) * (1 + dist.get_rank())
    before = mine.clone()
    assert all_reduce(mine, WORLD).tolist() == [3.0, 6.0]
    assert torch.equal(mine, before)
    assert all_reduce(torch.zeros(0), WORLD).shape == (0,)
    assert mean_of_ranks(mine[0]).item() == 1.5
    assert number_of_ranks() == 2


@CHECKS.add
def gather_rows_and_its_gradient():
    rank = dist.get_rank()
    mine = (torch.arange(3.0)[:, None] + torch.tensor([0.0, 0.5]))[[0, 1] if rank == 0 else [2]].requires_grad_()
    rows = gather_rows(mine, SIZES, WORLD)
    expected = torch.arange(3.0)[:, None] + torch.tensor([0.0, 0.5])
    assert torch.equal(rows, expected)
    factors = torch.tensor([1.0, 2.0, 4.0])[:, None] * (1 + rank)
    (gradient,) = torch.autograd.grad((rows * factors).sum(), mine)
    assert gradient[:, 0].tolist() == ([3.0, 6.0] if rank == 0 else [12.0])  # the sum over both ranks
    labels = torch.arange(3)[[0, 1] if rank == 0 else [2]]
    assert gather_rows(labels, SIZES, WORLD).tolist() == [0, 1, 2]
    assert gather_rows(labels[:0], (0, 0), WORLD).shape == (0,)
    assert gather_rows(labels[:1], (1, 1), WORLD).tolist() == [0, 2]


@CHECKS.add
def own_rows_and_their_gradient():
    rank = dist.get_rank()
    everything = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    mine = OwnRows.apply(everything, SIZES, WORLD)
    assert mine.tolist() == ([1.0, 2.0] if rank == 0 else [4.0])
    (gradient,) = torch.autograd.grad((mine * (5.0 + rank)).sum(), everything)
    assert gradient.tolist() == [5.0, 5.0, 6.0]


@CHECKS.add
def agreed_raises_on_every_rank():
    rank = dist.get_rank()
    numbers = {"k": 3.0, "rows": float(rank)}
    assert agreed(lambda: numbers, WORLD, may_differ=("rows",)) == {"k": [3.0, 3.0], "rows": [0.0, 1.0]}
    with pytest.raises(ValueError, match=r"disagree on rows: \[0.0, 1.0\]"):
        agreed(lambda: numbers, WORLD)

    def fail_on_the_second():
        if rank == 1:
            raise TypeError("wrong type here")
        return numbers

    expected = (TypeError, "^wrong type here$") if rank == 1 else (ValueError, "^rank 1 of .*: wrong type here$")
    with pytest.raises(expected[0], match=expected[1]):
        agreed(fail_on_the_second, WORLD)


@CHECKS.add
def a_signal_on_one_rank_stops_every_rank():
    run = object.__new__(Run)
    run.compute, run.stop = Compute(torch.device("cpu"), world_size=2, control=dist.group.WORLD), False
    assert run.should_stop() is False
    run.stop = dist.get_rank() == 1
    assert run.should_stop() is True


@CHECKS.add
def decisions_of_the_first_rank_are_shared():
    rank = dist.get_rank()
    assert checkpoint.all_ranks(rank) == [0, 1]
    assert checkpoint.shared(lambda: f"rank {rank}") == "rank 0"

    def refuse():
        assert rank == 0
        raise TrainError("no checkpoint")

    with pytest.raises(TrainError, match="no checkpoint"):
        checkpoint.shared(refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def errors(folder):
    return ranks.run(2, CHECKS | {"spherical layer": partial(spherical.work, folder)}, folder)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(errors, name):
    ranks.expect_none(errors[name])


def test_two_processes_make_the_step_of_a_spherical_layer(errors, folder):
    ranks.expect_none(errors["spherical layer"])
    spherical.check_weights(folder)
