"""The choice of a backend: what is wanted, what serves, and one warning if it does not work."""

import threading

import pytest
import torch

import topk_registry as tr
from topk_registry.functional import perturbed_hinge, perturbed_topk, smooth_topk
from topk_registry.ops import backend
from topk_registry.ops.backend import choose
from topk_registry.ops.masses import Masses

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten():
    backend.forget_choices()
    yield
    backend.forget_choices()


def right(device):
    return True


def test_the_backend_that_serves_is_chosen_and_tried_once():
    calls = []

    def tried(device):
        calls.append(device)
        return True

    assert [choose(CPU, "numba", tried) for _ in range(3)] == ["numba"] * 3
    assert calls == [CPU]
    assert choose(CPU, None, right) == "torch"


@pytest.mark.parametrize("fault", ["wrong", "raises", "missing"])
def test_a_backend_that_fails_warns_once_and_gives_way(fault, monkeypatch):
    def self_test(device):
        if fault == "raises":
            raise OSError("no compiler")
        return fault != "wrong"

    if fault == "missing":
        monkeypatch.setattr(backend, "find_spec", lambda name: None)
    word = {"wrong": "wrong", "raises": "no compiler", "missing": "pip install numba"}[fault]
    with pytest.warns(UserWarning, match=word) as caught:
        assert [choose(CPU, "numba", self_test) for _ in range(2)] == ["torch"] * 2
    assert len(caught) == 1


def test_the_block_is_stronger_than_the_environment(monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert choose(CPU, "numba", right) == "torch"
    with tr.use_backend("auto"):
        assert choose(CPU, "numba", right) == "numba"
        with tr.use_backend("triton"):  # which does not serve the CPU
            assert choose(CPU, "numba", right) == "torch"
        assert choose(CPU, "numba", right) == "numba"
    backend.forget_choices()
    monkeypatch.setenv(backend.VARIABLE, "fast")
    with pytest.raises(ValueError, match=backend.VARIABLE):
        choose(CPU, "numba", right)
    with pytest.raises(ValueError, match="backend"), tr.use_backend("cuda"):
        pass


def test_a_block_holds_for_its_thread_and_ends_with_an_error():
    seen = []

    @tr.use_backend("torch")
    def fail():
        thread = threading.Thread(target=lambda: seen.append(backend.preferred()))
        thread.start()
        thread.join()
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["auto"]
    assert backend.preferred() == "auto"


@pytest.mark.parametrize("operator", backend.OPERATORS)
def test_the_report_says_what_serves_and_why(operator):
    (record,) = [one for one in backend.report() if (one.operator, one.device) == (operator, "cpu")]
    assert (record.backend, record.why) == ("numba", "the fastest backend that works")
    with tr.use_backend("torch"):
        (record,) = [one for one in backend.report() if (one.operator, one.device) == (operator, "cpu")]
    assert record.backend == "torch"
    assert "use_backend" in record.why


LABELS = torch.tensor([1, 4])
IN_GRAPHS = {
    "smooth_topk at labels": lambda s: smooth_topk(s, Masses.of(s, LABELS), k=3),
    "smooth_topk at masses": lambda s: smooth_topk(s, Masses.of(s, LABELS, label_smoothing=0.1), k=3),
    "perturbed_topk": lambda s: perturbed_topk(s, 3),
    "perturbed_hinge": lambda s: perturbed_hinge(s, Masses.of(s, LABELS), k=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("operator", IN_GRAPHS)
def test_the_first_use_may_be_in_a_compiled_graph(operator):
    torch.compiler.reset()
    compiled = torch.compile(IN_GRAPHS[operator], fullgraph=True, backend="eager")
    assert compiled(torch.randn(2, 9)).isfinite().all()
    assert list(backend._problems.values()) == [""]  # one backend was tried, and it works


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((7, 5), "the GPU kernels need compute capability 8.0, cuda has 7.5"), ((8, 0), ""), ((12, 0), "")],
)
def test_gpus_that_are_too_old(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    backend.forget_choices()
    assert backend.too_old(torch.device("cuda")) == reason
    backend.forget_choices()


def test_on_rocm_the_self_test_decides(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    backend.forget_choices()
    assert backend.too_old(torch.device("cuda")) == ""
    backend.forget_choices()
