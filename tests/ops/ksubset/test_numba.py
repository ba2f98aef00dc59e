"""The compiled CPU kernel: the torch path's results, whatever the threads, and done without where it is missing."""

import importlib.util
import sys

import pytest
import torch

from tests.ops.ksubset.scores import KINDS, scores
from topk_registry import topk_label_margins
from topk_registry.ops.ksubset import cpu, dispatch, torch_path

INF, NAN = float("inf"), float("nan")


def both(s, label, k, theta):
    return torch_path.label_margins(s, label, k, theta), cpu.label_margins(s, label, k, theta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 1), (7, 3), (40, 20), (513, 5), (1300, 50)])
def test_is_the_torch_path(kind, n, k, dtype):
    s = scores(kind, n, rows=3).to(dtype)
    label = torch.tensor([0, n // 2, n - 1])
    eps = torch.finfo(dtype).eps
    for theta in (1e-3, 0.5, 50.0):
        (m, g), (found, gradient) = both(s, label, k, theta)
        # margins of the same exact scores: what differs is the rounding of the logarithms, in units of theta
        scale = theta * m.div(theta).abs().clamp(min=1.0)
        assert ((found - m).abs() <= 40 * eps * scale).all()
        # entries are differences of chances of up to one
        assert ((gradient - g).abs() <= 20 * eps).all()


def test_every_entry_is_written(monkeypatch):
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **o: empty(*a, **o).fill_(NAN))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **o: empty_like(*a, **o).fill_(NAN))
    margin, gradient = cpu.label_margins(torch.randn(5, 700), torch.arange(5), 4, 1.0)
    assert margin.isfinite().all()
    assert gradient.isfinite().all()


def test_neither_threads_nor_other_rows_change_a_bit(monkeypatch):
    monkeypatch.setattr(cpu, "ALONE", 0)
    s = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    label = torch.randint(400, (300,), generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(cpu.label_margins(s, label, 5, 0.7))
    finally:
        torch.set_num_threads(before)
    alone = [cpu.label_margins(s[i : i + 1], label[i : i + 1], 5, 0.7) for i in (0, 149, 150, 299)]
    for margin, gradient in results[1:]:
        assert torch.equal(margin, results[0][0])
        assert torch.equal(gradient, results[0][1])
    for i, (margin, gradient) in zip((0, 149, 150, 299), alone, strict=True):
        assert torch.equal(margin[0], results[0][0][i])
        assert torch.equal(gradient[0], results[0][1][i])


def test_rows_with_nan_and_infinities():
    s = torch.tensor([[0.0, 1, 2, 3, 4], [0, NAN, 2, 3, 4], [0, 1, 2, -INF, 3], [0, 1, 2, 3, INF], [NAN, 1, 2, 3, 4]])
    label = torch.zeros(5, dtype=torch.long)
    (m, g), (found, gradient) = both(s, label, 2, 1.0)
    torch.testing.assert_close(found, m, equal_nan=True)
    assert gradient[1].isnan().all()
    for row in (0, 2, 3):
        torch.testing.assert_close(gradient[row], g[row])
    assert gradient[2, 3] == 0


def test_an_empty_batch():
    margin, gradient = cpu.label_margins(torch.zeros(0, 9), torch.zeros(0, dtype=torch.long), 2, 1.0)
    assert margin.shape == (0,)
    assert gradient.shape == (0, 9)


def test_auto_takes_it_where_it_fits():
    s = torch.zeros(1, 3)
    assert dispatch._label_kernel("auto", s, 5) is cpu.label_margins
    assert dispatch._label_kernel("auto", s, dispatch.NUMBA_LARGEST_K + 1) is torch_path.label_margins
    assert dispatch._label_kernel("auto", s.to("meta"), 5) is torch_path.label_margins
    assert dispatch._label_kernel("torch", s, 5) is torch_path.label_margins
    with pytest.raises(ValueError, match="impl 'numba' is for the CPU and k or n - k up to 256: cpu, 300"):
        topk_label_margins(torch.zeros(1, 1000), torch.tensor([0]), 300, impl="numba")


@pytest.fixture
def kernel_forgotten():
    dispatch._numba_kernel.cache_clear()
    yield
    dispatch._numba_kernel.cache_clear()


@pytest.mark.usefixtures("kernel_forgotten")
def test_without_numba_the_torch_path_serves(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert dispatch._label_kernel("auto", torch.zeros(1, 3), 1) is torch_path.label_margins


@pytest.mark.usefixtures("kernel_forgotten")
def test_a_numba_that_does_not_work_is_told_of_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "topk_registry.ops.ksubset.cpu", None)  # importing it raises
    monkeypatch.delattr(importlib.import_module("topk_registry.ops.ksubset"), "cpu")
    with pytest.warns(UserWarning, match="numba is installed but cannot be used, the losses are slower"):
        assert dispatch._label_kernel("auto", torch.zeros(1, 3), 1) is torch_path.label_margins
    assert dispatch._label_kernel("auto", torch.zeros(1, 3), 1) is torch_path.label_margins
