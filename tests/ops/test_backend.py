"""One switch for every operator, backends that are tried before they are trusted, and a report of their service."""

import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

import topk_registry as tr
from topk_registry.ops import backend
from topk_registry.ops.backend import Backend, Operator, report
from topk_registry.ops.ksubset.backends import OPERATOR as KSUBSET
from topk_registry.ops.perturbed.backends import OPERATOR as PERTURBED

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def forgotten(without_library):
    backend.forget_choices()
    yield
    backend.forget_choices()


def operator(outcome, package="numba"):
    """An operator whose one backend is tried with this outcome, and the list of its trials."""
    calls = []

    def trial(kernels, *args):
        calls.append(args)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome() if callable(outcome) else outcome

    def serves(device, *precision):
        return True

    fast = Backend(package, "topk_registry.ops.ksubset.torch.backend", package, serves, "everything")
    slow = Backend("torch", "topk_registry.ops.ksubset.torch.backend", None, serves, "everything")
    return Operator("tried", {package: fast, "torch": slow}, trial), calls


def test_a_trial_is_made_once_for_the_same_arguments():
    tried, calls = operator(True)
    assert {tried.choose("auto", CPU, double) for double in (False, True, False)} == {"numba"}
    assert calls == [(CPU, False), (CPU, True)]
    backend.forget_choices()
    tried.choose("auto", CPU, False)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("outcome", "problem"), [(False, "their results are wrong"), (RuntimeError("no compiler"), "no compiler")]
)
def test_what_does_not_run_is_told_of_once(outcome, problem):
    tried, calls = operator(outcome)
    with pytest.warns(UserWarning, match=f"numba is installed but its kernels cannot be used here.*{problem}"):
        assert tried.choose("auto", CPU) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tried.choose("auto", CPU) == "torch"
        assert operator(outcome)[0].choose("auto", torch.device("meta")) == "torch"  # one warning for one problem
    assert len(calls) == 1


def real() -> bool:
    """Whether a tensor is what it looks like and products keep their precision."""
    x = torch.ones(1, 1)
    return type(x) is torch.Tensor and x.data_ptr() != 0 and (x @ x).dtype == torch.float32


def test_a_trial_knows_nothing_of_the_callers_modes():
    outcomes = []

    def choose():
        backend.forget_choices()
        outcomes.append(operator(real)[0].choose("auto", CPU))

    def loss(x):
        choose()
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    with FakeTensorMode():
        choose()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not real()
        choose()
    assert outcomes == ["numba"] * 3


def test_no_trial_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(backend, "too_old", lambda device: "")
    tried, calls = operator(False)
    monkeypatch.setattr(backend, "_captures", lambda: True)
    assert tried.choose("auto", GPU) == "numba"
    assert not calls
    monkeypatch.setattr(backend, "_captures", lambda: False)
    with pytest.warns(UserWarning, match="cannot be used here"):
        assert tried.choose("auto", GPU) == "torch"


def both():
    return KSUBSET.choose("auto", CPU, 5, False), PERTURBED.choose("auto", CPU)


def test_one_switch_for_every_operator(monkeypatch):
    assert both() == ("numba", "numba")
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "torch")
    assert both() == ("torch", "torch")
    with tr.use_backend("numba"):
        assert both() == ("numba", "numba")
        with tr.use_backend("triton"):  # which does not serve the CPU
            assert both() == ("torch", "torch")
        assert both() == ("numba", "numba")
    assert both() == ("torch", "torch")
    assert KSUBSET.choose("numba", CPU, 5, False) == "numba"  # impl= of a call is stronger
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "")
    assert both() == ("numba", "numba")


def test_the_switch_decorates_and_leaves_other_threads_alone():
    found = []

    @tr.use_backend("torch")
    def decorated():
        found.append(both())
        thread = threading.Thread(target=lambda: found.append(both()))
        thread.start()
        thread.join()

    decorated()
    decorated()
    found.append(both())
    assert found == [("torch", "torch"), ("numba", "numba")] * 2 + [("numba", "numba")]


def test_the_switch_is_left_when_an_error_passes():
    with pytest.raises(KeyError), tr.use_backend("torch"):
        raise KeyError
    assert both() == ("numba", "numba")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_the_import_of_kernels(tmp_path, monkeypatch):
    """Without that the child would wait for ever for the thread that imports: it has no such thread."""
    begun = threading.Event()
    monkeypatch.setattr(sys, "begun", begun, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_kernels.py").write_text("import sys, time\nsys.begun.set()\ntime.sleep(0.3)\nkernels = 7\n")
    thread = threading.Thread(target=backend.load, args=["slow_kernels"])
    thread.start()
    assert begun.wait(10)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits for ever
        os._exit(backend.load("slow_kernels").kernels)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    thread.join()


def test_a_wrong_name_lists_the_right_ones(monkeypatch):
    names = "must be 'auto' or one of 'numba', 'triton', 'torch', got 'cuda'"
    with pytest.raises(ValueError, match=f"backend {names}"), tr.use_backend("cuda"):
        pass
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "cuda")
    with pytest.raises(ValueError, match=f"TOPK_REGISTRY_BACKEND {names}"):
        tr.functional.topk_margins(torch.zeros(1, 4), 2)


def test_the_report_says_which_backend_serves_and_why(monkeypatch):
    of_cpu = {record.operator: record for record in report() if record.device == "cpu"}
    assert {name: (r.backend, r.why) for name, r in of_cpu.items()} == dict.fromkeys(
        ("ksubset", "perturbed", "rows", "update"), ("numba", "the fastest that serves")
    )
    with tr.use_backend("torch"):
        assert {(r.backend, r.why) for r in report() if r.device == "cpu"} == {
            ("torch", "chosen by topk_registry.use_backend")
        }
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "triton")
    assert [r.why for r in report() if r.device == "cpu"] == ["numba is switched off"] * 4
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "auto")
    backend.forget_choices()
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="numba is not installed"):
        assert {(r.backend, r.why) for r in report() if r.device == "cpu"} == {
            ("torch", "numba is not installed (pip install numba)")
        }


@pytest.mark.slow
def test_saved_programs_load_after_importing_the_operators(tmp_path):
    """In another process, which knows nothing of how the program was made."""

    class Loss(torch.nn.Module):
        def forward(self, s, label):
            return tr.functional.topk_label_margins(s, label, 2).mean() + tr.functional.perturbed_topk(s, 2).mean()

    s, label = torch.randn(4, 9), torch.tensor([0, 1, 2, 8])
    torch.export.save(torch.export.export(Loss(), (s, label)), tmp_path / "loss.pt2")
    code = (
        "import sys, torch, topk_registry.ops\n"
        "assert 'torch._dynamo' not in sys.modules and 'numba' not in sys.modules\n"
        f"program = torch.export.load({str(tmp_path / 'loss.pt2')!r})\n"
        "print(program.module()(torch.zeros(4, 9), torch.tensor([0, 1, 2, 8])).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout)


def test_a_library_whose_kernels_are_wrong_gives_way_to_the_package():
    rejected = []

    def serves(device, *precision):
        return True

    fast = Backend(
        "numba", "topk_registry.ops.ksubset.torch.backend", "numba", serves, "everything",
        is_prebuilt=lambda: not rejected, reject=rejected.append,
    )  # fmt: skip
    slow = Backend("torch", "topk_registry.ops.ksubset.torch.backend", None, serves, "everything")
    tried = Operator("tried", {"numba": fast, "torch": slow}, lambda *_: bool(rejected))
    with pytest.warns(UserWarning, match="the library of kernels is installed but its kernels cannot be used here"):
        assert tried.choose("auto", CPU) == "numba"
    assert rejected == ["its kernels cannot be used here (their results are wrong)"]


def test_a_kernel_that_must_not_be_compiled_is_no_problem_of_the_backend():
    def trial(*_):
        raise backend.NotCompiledError

    tried, _ = operator(True)
    tried = Operator("tried", tried.backends, trial)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(backend.NotCompiledError):
            tried.choose("auto", CPU)
    assert Operator("tried", tried.backends, lambda *_: True).choose("auto", CPU) == "numba"
