"""Which implementation serves where, and what happens where one is missing or broken."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from topk_registry.functional import topk_label_margins, topk_margins
from topk_registry.ops import backend
from topk_registry.ops.ksubset import row_loss
from topk_registry.ops.ksubset.backends import OPERATOR

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def forgotten(without_library):
    forget()
    yield
    forget()


def forget():
    """Choose again, with kernels made again."""
    backend.forget_choices()
    row_loss._kernel.cache_clear()


def test_auto_takes_the_first_that_serves():
    assert OPERATOR.choose("auto", CPU, 5, False) == "numba"
    assert OPERATOR.choose("auto", CPU, 1025, True) == "torch"
    assert OPERATOR.choose("auto", META, 5, False) == "torch"
    assert OPERATOR.choose("torch", CPU, 5, False) == "torch"


def test_on_gpus_that_are_not_too_old_auto_takes_the_kernels(monkeypatch):
    gpu, capability = torch.device("cuda"), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backend, "_problem", lambda one, device, trial: backend.too_old(device))  # no trial without it
    backend.forget_choices()
    assert [OPERATOR.choose("auto", gpu, k, False) for k in (1, 64, 65)] == ["triton", "triton", "torch"]
    assert OPERATOR.choose("auto", gpu, 5, True) == "torch"
    with pytest.raises(
        ValueError, match=r"impl 'triton' is for GPUs of compute capability 8\.0 and up, half or single"
    ):
        OPERATOR.choose("triton", CPU, 5, False)

    capability = (7, 5)
    backend.forget_choices()
    with pytest.warns(UserWarning, match="need compute capability 8.0, cuda has 7.5: the top-k losses are slower"):
        assert OPERATOR.choose("auto", gpu, 5, False) == "torch"
    assert OPERATOR.choose("auto", gpu, 5, False) == "torch"
    backend.forget_choices()


@pytest.mark.parametrize("f", [topk_margins, lambda s, k, impl: topk_label_margins(s, torch.tensor([0]), k, impl=impl)])
def test_a_backend_that_does_not_serve_says_where_it_does(f):
    with pytest.raises(ValueError, match="impl 'numba' is for the CPU and k or n - k up to 1024: cpu, 1500"):
        f(torch.zeros(1, 4000), 1500, impl="numba")


@pytest.mark.usefixtures("forgotten")
def test_without_numba_the_torch_path_serves_and_says_so_once(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"numba is not installed \(pip install numba\): the top-k losses are slower"):
        assert OPERATOR.choose("auto", CPU, 1, False) == "torch"
    assert OPERATOR.choose("auto", CPU, 1, False) == "torch"


@pytest.mark.usefixtures("forgotten")
def test_a_numba_that_does_not_work_is_told_of_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "topk_registry.ops.ksubset.numba.backend", None)  # importing it raises
    monkeypatch.delattr(importlib.import_module("topk_registry.ops.ksubset"), "numba", raising=False)
    with pytest.warns(UserWarning, match=r"numba is installed but cannot be used \(.*\): the top-k losses are slower"):
        assert OPERATOR.choose("auto", CPU, 1, False) == "torch"
    assert OPERATOR.choose("auto", CPU, 1, False) == "torch"
    assert topk_margins(torch.zeros(1, 3), 1).shape == (1, 3)


@pytest.mark.usefixtures("forgotten")
def test_kernels_that_do_not_do_here_what_they_should_are_not_used(monkeypatch):
    pytest.importorskip("numba")

    def fails(*_):
        raise RuntimeError("no compiler")

    def of(run):
        return lambda *_: SimpleNamespace(run=run)

    monkeypatch.setattr(row_loss, "loss_kernel", of(lambda own, options, s, wanted: (s.sum(), s)))
    with pytest.warns(UserWarning, match="numba is installed but its kernels cannot be used here.*results are wrong"):
        assert OPERATOR.choose("auto", CPU, 5, True) == "torch"
    forget()
    monkeypatch.setattr(row_loss, "loss_kernel", of(fails))
    with pytest.warns(UserWarning, match="numba is installed but its kernels cannot be used here.*no compiler"):
        assert OPERATOR.choose("auto", CPU, 5, True) == "torch"
    assert OPERATOR.choose("auto", CPU, 7, True) == "torch"
    assert OPERATOR.choose("numba", CPU, 5, True) == "numba"  # who asks for it gets it, and its error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck looks at it
@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_as_operators_of_torch(impl):
    """The demands of compilation, export, autocast and autograd on an operator."""
    s = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    label, g = torch.tensor([0, 4, 8]), torch.randn(3, 9, dtype=torch.float64)
    operators = torch.ops.topk_registry
    torch.library.opcheck(operators.label_margins.default, (s, label, 2, 0.7, impl))
    torch.library.opcheck(operators.margins.default, (s, 2, 0.7, impl))
    torch.library.opcheck(operators.margins_backward.default, (g, s.detach(), 2, 0.7, impl))


def test_exports_as_one_node():
    class Loss(torch.nn.Module):
        def forward(self, s, label):
            return topk_label_margins(s, label, 2).mean()

    s, label = torch.randn(4, 9), torch.tensor([0, 1, 2, 8])
    program = torch.export.export(Loss(), (s, label))
    assert [str(node.target) for node in program.graph.nodes].count("topk_registry.label_margins.default") == 1
    torch.testing.assert_close(program.module()(s, label), Loss()(s, label))
