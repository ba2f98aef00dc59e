"""Compiled bodies: kept on disk where that can be, and run by all threads of a team."""
# pyright: reportCallIssue=false
# numba's intrinsics are called without their first parameter

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")
caching = pytest.importorskip("numba.core.caching")

from topk_registry.ops.cpu import compiling, threads  # noqa: E402
from topk_registry.ops.cpu.functions import BODY  # noqa: E402
from topk_registry.ops.cpu.jobs import spans  # noqa: E402
from topk_registry.ops.cpu.memory import array  # noqa: E402


def counting():
    """A body that adds 1 to each number of an array."""

    def body(job):
        _, count, address = array(job, 3, np.int64)
        numbers = array(address, count, np.int64)
        for start, stop in spans(job, 3, count):
            for i in range(start, stop):
                numbers[i] += 1

    return compiling.kernel(BODY.signature, body, "counting").ctypes


@pytest.mark.parametrize("team", [1, 2])
def test_each_row_is_taken_once(team):
    numbers = torch.zeros(100, dtype=torch.int64)
    threads.run(counting(), len(numbers), numbers, threads=team)
    assert (numbers == 1).all()


def test_without_a_place_to_keep_it_a_body_is_compiled_all_the_same(monkeypatch, tmp_path):
    """As for a user without a home, on a file system that cannot be written."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(UserWarning, match="every process compiles its own.* set NUMBA_CACHE_DIR"):
        body = counting()
    numbers = torch.zeros(10, dtype=torch.int64)
    threads.run(body, len(numbers), numbers, threads=1)
    assert (numbers == 1).all()
