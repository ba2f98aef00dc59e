"""Run checks in one group of processes: starting processes costs more than what they check."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers import processes


class Checks(dict[str, Callable[[], object]]):
    """Checks by their names."""

    def add(self, check: Callable[[], object]) -> Callable[[], object]:
        """Decorator of a function that each rank calls."""
        self[check.__name__] = check
        return check


def run(world: int, checks: dict[str, Callable], folder: Path) -> dict[str, list[str]]:
    """Call every check on all of ``world`` ranks, one after the other; name -> the ranks' errors, "" for none.

    A check that fails on one rank alone may leave the others waiting: the timeout of the group ends them.
    """
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    context = processes()
    environment = dict(os.environ)  # as it is now: a fork server keeps that of its start
    ranks = [
        context.Process(target=_rank, args=(rank, world, checks, str(folder), environment)) for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
        if rank.is_alive():
            rank.kill()
    parts = [torch.load(path) if (path := folder / f"{rank}.pt").exists() else {} for rank in range(world)]
    return {name: [part.get(name, "did not end") for part in parts] for name in checks}


def expect_none(errors: list[str]) -> None:
    """Fail with the errors of the ranks, where there are any."""
    wrong = [error for error in errors if error]
    assert not wrong, "\n".join(wrong)


def _rank(rank: int, world: int, checks: dict[str, Callable], folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.environ["TOPK_REGISTRY_BACKEND"] = "torch"  # kernels have their own tests, and take their time to start
    store, found = dist.FileStore(f"{folder}/store", world), {}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))

    for name, check in checks.items():
        try:
            check()
            found[name] = ""
        except Exception:  # reported by the test of its name
            found[name] = traceback.format_exc()
        torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
