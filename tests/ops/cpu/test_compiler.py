"""The internals of numba that ``compiler.py`` uses. If a test fails with a new release of numba, adapt that file."""

import numba
import numpy as np
import pytest
import torch

from topk_registry.ops.cpu import compiler
from topk_registry.ops.cpu.compiler import LinkedCode, compiled_body
from topk_registry.ops.cpu.memory import array
from topk_registry.ops.cpu.numbers import compiled


@compiled
def double(x):
    return 2 * x


def body(job):
    numbers = array(job, 2, np.float64)
    numbers[1] = double(numbers[0])


def doubled() -> float:
    numbers = torch.tensor([3.0, 0.0], dtype=torch.float64)
    compiled_body(body)(numbers.data_ptr())
    return numbers[1].item()


@pytest.fixture
def made(monkeypatch, tmp_path) -> list[str]:
    """The names of the functions that became machine code."""
    names, make = [], LinkedCode.make_machine_code

    def record(self):
        names.extend([] if self.is_machine_code else [self.name])
        make(self)

    monkeypatch.setattr(LinkedCode, "make_machine_code", record)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return names


def test_only_the_body_of_a_kernel_becomes_machine_code(made):
    assert doubled() == 6
    assert made == ["body"], "numba optimizes each function again, which makes the first use of a kernel slow"
    assert numba.njit(lambda x: x + 1)(1) == 2  # numba compiles other functions as usual
    assert made == ["body"]


def test_a_body_is_compiled_again_if_a_source_file_changed(made, monkeypatch, capsys):
    compiler._log_compiling.cache_clear()
    for edition, compilations in (("first", 1), ("first", 1), ("second", 2), ("first", 2)):
        monkeypatch.setattr(compiler, "edition", lambda edition=edition: edition)
        assert doubled() == 6
        assert len(made) == compilations
    assert capsys.readouterr().err.count("compiling") == 1


def test_each_process_compiles_if_the_cache_is_damaged_or_cannot_be_written(made, tmp_path, monkeypatch):
    assert doubled() == 6
    for file in tmp_path.rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(UserWarning, match="each process compiles"):
        assert doubled() == 6
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    with pytest.warns(UserWarning, match="each process compiles"):
        assert doubled() == 6
    assert made == ["body"] * 3
