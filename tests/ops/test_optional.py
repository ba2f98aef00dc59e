"""Kernels are tried before they are trusted, once, and by themselves."""

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from topk_registry.ops import optional

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten():
    optional.forget()
    yield
    optional.forget()


def counted(outcome):
    """A trial that comes to ``outcome``, and the list of what it was called with."""
    calls = []

    def trial(*args):
        calls.append(args)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return trial, calls


def test_a_trial_is_made_once_for_the_same_arguments():
    trial, calls = counted(True)
    assert all(optional.runs("numba", trial, CPU, double) for double in (False, True, False))
    assert calls == [(CPU, False), (CPU, True)]
    optional.forget()
    assert optional.runs("numba", trial, CPU, False)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("outcome", "problem"), [(False, "their results are wrong"), (RuntimeError("no compiler"), "no compiler")]
)
def test_what_does_not_run_is_told_of_once(outcome, problem):
    trial, calls = counted(outcome)
    with pytest.warns(UserWarning, match=f"triton is installed but its kernels cannot be used here.*{problem}"):
        assert not optional.runs("triton", trial, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not optional.runs("triton", trial, CPU)
    assert len(calls) == 1


def real() -> bool:
    """Whether a tensor is what it looks like and products keep their precision."""
    x = torch.ones(1, 1)
    return type(x) is torch.Tensor and x.data_ptr() != 0 and (x @ x).dtype == torch.float32


@pytest.mark.slow
def test_a_trial_knows_nothing_of_the_callers_modes():
    outcomes = []

    def loss(x):
        outcomes.append(optional.runs("numba", real))
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    optional.forget()
    with FakeTensorMode():
        outcomes.append(optional.runs("numba", real))
    optional.forget()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not real()
        outcomes.append(optional.runs("numba", real))
    assert outcomes == [True, True, True]


def test_no_trial_while_a_graph_is_captured(monkeypatch):
    trial, calls = counted(False)
    monkeypatch.setattr(optional, "_captures", lambda: True)
    assert optional.runs("triton", trial, torch.device("cuda"))
    assert not calls
    monkeypatch.setattr(optional, "_captures", lambda: False)
    with pytest.warns(UserWarning, match="cannot be used here"):
        assert not optional.runs("triton", trial, torch.device("cuda"))
