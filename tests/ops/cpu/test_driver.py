"""Kernels compile at their first use, log it, are cached, share rows among threads, and keep their scratch memory."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from topk_registry.ops.cpu import driver
from topk_registry.ops.cpu.driver import add_up, kernel, spans
from topk_registry.ops.cpu.memory import array

PROGRAM = (
    "import torch, topk_registry as tr\n"
    "loss = tr.create_loss('smooth_topk_svm', k=2)(torch.eye(3, 9), torch.arange(3))\n"
    "print(float(loss))"
)


def test_borrowed_memory_belongs_to_the_caller():
    # numba releases a local variable after its last use, so memory that is borrowed from one may be given away again
    found = 0
    for file in Path(driver.__file__).parents[1].rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            borrowed = [ast.unparse(node.args[0]) for node in calls if ast.unparse(node.func) == "borrowed"]
            if isinstance(function, ast.FunctionDef) and borrowed:
                assert set(borrowed) <= {argument.arg for argument in function.args.args}, f"{file}: {function.name}"
                found += len(borrowed)
    assert found >= 3


@kernel
def rows_taken(job):
    """Count how often each row is taken, and add up the numbers of the rows."""
    _, _, B, block, counts, numbers, total = array(job, 7, np.int64)
    counts, numbers, total = array(counts, B, np.int64), array(numbers, B, np.float32), array(total, 1, np.float32)
    done = 0
    for i, j in spans(job, block, B):
        for r in range(i, j):
            counts[r] += 1
            numbers[r] += np.float32(1 / (r + 1))
        done += j - i
    add_up(job, done, numbers, total)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("openmp", [True, False])
def test_each_row_is_taken_once_and_the_sum_is_of_all_rows(threads, openmp, monkeypatch):
    if not openmp:
        monkeypatch.setattr(driver, "_openmp", lambda: None)
    for B, block in ((0, 1), (1, 4), (1000, 7)):
        counts, numbers, total = torch.zeros(B, dtype=torch.int64), torch.zeros(B), torch.empty(())
        rows_taken.run(threads, B, block, counts, numbers, total)
        assert (counts == 1).all()
        expected = sum(1 / (r + 1) for r in range(B))
        assert total.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_first_use_compiles_once_says_so_and_caches(tmp_path):
    def run() -> tuple[str, int]:
        variables = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True, env=variables)
        return done.stdout.split()[0], done.stderr.count("compiling")

    value, compilations = run()
    assert compilations == 1
    assert list(tmp_path.rglob("*.nbc"))
    assert run() == (value, 0)
