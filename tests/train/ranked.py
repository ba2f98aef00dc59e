"""Training runs in one process, or on all ranks of a group that is there, and comparisons of what they leave."""

import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from timm.utils.checkpoint_saver import load_checkpoint_metadata

from tests import ranks
from topk_registry.train import Trainer
from topk_registry.train.errors import Interrupted
from topk_registry.train.setup.compute import Compute

FOLDER = "TOPK_TEST_FOLDER"  # of all runs, for the ranks


@contextmanager
def trained_on_two(checks, folder, *, before=lambda: None):
    """The errors of checks that train on two ranks; the folder holds the runs, also those of one process.

    Args:
        checks: see :func:`tests.ranks.run`.
        before: trains in one process first, what the ranks go on from.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        patch.setenv("TOPK_REGISTRY_BACKEND", "torch")
        before()
        yield ranks.run(2, checks, folder)


def here():
    """The number of processes, and this one's."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def trained(config, name, **hooks):
    """The result of a run in double precision, in one process or on all ranks."""
    world, rank = here()
    compute = Compute(torch.device("cpu"), dtype=torch.float64, rank=rank, world_size=world)
    real = Compute.set_up

    def set_up(config):
        torch.manual_seed(config.seed + rank)
        return compute if not config.amp else replace(real(config), rank=rank, world_size=world)

    Compute.set_up = staticmethod(set_up)
    try:
        trainer = Trainer(config.replace(output=os.environ[FOLDER], experiment=name), quiet=True, **hooks)
        return trainer.fit()
    finally:
        Compute.set_up = real


def stopped(config, name, *, epoch=1, step=1):
    """Train until a signal after some steps of an epoch, by default the second."""

    def on_step(run, loss):
        run.stopped = lambda: run.progress.epoch == epoch and run.progress.step >= step

    with pytest.raises(Interrupted):
        trained(config, name, on_step=on_step)


def last(name):
    return Path(os.environ[FOLDER], name, "last.pth.tar")


def same(one, other, path="", tolerance=1e-9):
    """Both hold the same names and, up to the order of sums, the same numbers."""
    if isinstance(one, torch.Tensor) and one.is_floating_point():
        assert one.shape == other.shape, path
        assert float((one - other).abs().max()) <= tolerance * (1 + float(one.abs().max())), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            same(one[key], other[key], f"{path}/{key}", tolerance)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}/{i}", tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=2e-6), path  # likelihoods are measured in single precision
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, path


def same_checkpoint(one, other, *, history=True):
    one, other = (load_checkpoint_metadata(last(name)) for name in (one, other))
    for key in ("state_dict", "state_dict_ema", "optimizer"):
        same(one.get(key), other.get(key), key)
    states = [each["task_state"] for each in (one, other)]
    same(states[0]["criterion"], states[1]["criterion"], "criterion")
    if history:
        same(states[0]["progress"]["history"], states[1]["progress"]["history"], "history")


def assert_same(one, other, path=""):
    """Both are of the same types and hold the same names and the same numbers, bit for bit."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert one == other, path
