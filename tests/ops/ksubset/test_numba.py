"""The compiled CPU kernels: the torch path's results, whatever the threads."""

from pathlib import Path

import pytest
import torch

from tests.ops.ksubset.scores import KINDS, scores
from topk_registry.ops.cpu import library
from topk_registry.ops.cpu import threads as team
from topk_registry.ops.ksubset.numba import backend as cpu
from topk_registry.ops.ksubset.torch import backend as composite

INF, NAN = float("inf"), float("nan")
SIZES = [(2, 1), (3, 1), (7, 3), (40, 20), (100, 5), (513, 5), (1300, 50)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.slow
def test_is_the_torch_path(kind, n, k, dtype):
    s = scores(kind, n, rows=3).to(dtype)
    label = torch.tensor([0, n // 2, n - 1])
    g = torch.randn(3, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    eps = torch.finfo(dtype).eps
    for theta in (1e-3, 0.5, 50.0):
        m, gradient = composite.label_margins(s, label, k, theta)
        found, found_gradient = cpu.label_margins(s, label, k, theta)
        # margins of the same exact scores: what differs is the rounding of the logarithms, in units of theta
        scale = theta * m.div(theta).abs().clamp(min=1.0)
        assert ((found - m).abs() <= 40 * eps * scale).all()
        # entries are differences of chances of up to one
        assert ((found_gradient - gradient).abs() <= 20 * eps).all()

        m, found = composite.margins(s, k, theta), cpu.margins(s, k, theta)
        assert ((found - m).abs() <= 40 * eps * theta * m.div(theta).abs().clamp(min=1.0)).all()
        exact = composite.margins_backward(g.double(), s.double(), k, theta)
        found = cpu.margins_backward(g, s, k, theta)
        # three times the error of torch operations in single precision, in units of its rounding, with half a unit
        # for each of the largest cotangent, its odds, their product and the sum: in double precision the units are
        # smaller, the error of the reference is one of the three
        error = (composite.margins_backward(g.float(), s.float(), k, theta) - exact).abs().amax()
        units = error / torch.finfo(torch.float32).eps + 2 * g.abs().amax()
        assert (found - exact).abs().amax() <= 3 * units * eps


def kernels(s, label, g):
    margin, gradient = cpu.label_margins(s, label, 5, 0.7)
    return margin, gradient, cpu.margins(s, 5, 0.7), cpu.margins_backward(g, s, 5, 0.7)


def test_every_entry_is_written(monkeypatch):
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **o: empty(*a, **o).fill_(NAN))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **o: empty_like(*a, **o).fill_(NAN))
    for result in kernels(torch.randn(5, 700), torch.arange(5), torch.randn(5, 700)):
        assert result.isfinite().all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("openmp", [True, False])
def test_neither_threads_nor_other_rows_change_a_bit(monkeypatch, openmp):
    monkeypatch.setattr(cpu, "LEAST_WORK", 1)
    if not openmp:
        monkeypatch.setattr(team, "_openmp", lambda: None)
    s, g = torch.randn(2, 300, 400, generator=torch.Generator().manual_seed(0))
    label = torch.randint(400, (300,), generator=torch.Generator().manual_seed(1))
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(kernels(s, label, g))
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert torch.equal(found, expected)
    for i in (0, 149, 150, 299):
        for found, expected in zip(kernels(s[i : i + 1], label[i : i + 1], g[i : i + 1]), results[0], strict=True):
            assert torch.equal(found[0], expected[i])


def test_rows_with_nan_and_infinities():
    s = torch.tensor([[0.0, 1, 2, 3, 4], [0, NAN, 2, 3, 4], [0, 1, 2, -INF, 3], [0, 1, 2, 3, INF], [NAN, 1, 2, 3, 4]])
    label, g = torch.zeros(5, dtype=torch.long), torch.randn(5, 5)
    (m, gradient), (found, found_gradient) = (f.label_margins(s, label, 2, 1.0) for f in (composite, cpu))
    torch.testing.assert_close(found, m, equal_nan=True)
    assert found_gradient[[1, 4]].isnan().all()
    torch.testing.assert_close(found_gradient[[0, 2, 3]], gradient[[0, 2, 3]])
    assert found_gradient[2, 3] == 0

    m, found = composite.margins(s, 2, 1.0), cpu.margins(s, 2, 1.0)
    torch.testing.assert_close(found[[0, 2, 3]], m[[0, 2, 3]])
    assert found[[1, 4]].isnan().all()
    gradient, found = (f.margins_backward(g, s, 2, 1.0) for f in (composite, cpu))
    torch.testing.assert_close(found[[0, 2]], gradient[[0, 2]])
    assert found[[1, 4]].isnan().all()


def test_too_few_scores_and_labels_out_of_range_are_nan():
    s = torch.tensor([[0.0, -INF, -INF, -INF, -INF], [0.0, 1, 2, 3, 4], [0.0, 1, 2, 3, 4], [0.0, 1, 2, 3, 4]])
    margin, gradient = cpu.label_margins(s, torch.tensor([0, 5, -1, 1]), 2, 1.0)
    assert margin.isnan().tolist() == [True, True, True, False]
    assert gradient.isnan().all(1).tolist() == [True, True, True, False]
    assert cpu.margins(s[:1], 2, 1.0).isnan().all()


@pytest.mark.parametrize("order", ["rising", "falling", "periodic", "equal", "two values"])
def test_large_scores_wherever_they_are(order):
    """The search for the top group must hold where the scores of interest share few lines, or are very many."""
    n, k = 5000, 5
    s = {
        "rising": torch.arange(n),
        "falling": -torch.arange(n),
        "periodic": (torch.arange(n) % 512 == 7) * torch.arange(n),
        "equal": torch.zeros(n),
        "two values": torch.arange(n) % 2,
    }[order].float()[None] * 0.01
    g = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    for y in (0, 7, n - 1):
        expected, found = (f.label_margins(s, torch.tensor([y]), k, 1.0) for f in (composite, cpu))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=3e-6)
    torch.testing.assert_close(cpu.margins(s, k, 1.0), composite.margins(s, k, 1.0), rtol=1e-5, atol=1e-5)
    expected, found = (f.margins_backward(g, s, k, 1.0) for f in (composite, cpu))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_an_empty_batch():
    s = torch.zeros(0, 9)
    margin, gradient = cpu.label_margins(s, torch.zeros(0, dtype=torch.long), 2, 1.0)
    assert margin.shape == (0,)
    assert gradient.shape == cpu.margins(s, 2, 1.0).shape == cpu.margins_backward(s, s, 2, 1.0).shape == (0, 9)


@pytest.mark.parametrize("changed", ["cpu/jobs.py", "ksubset/numba/rows.py", "cpu/functions.py"])
def test_compiled_code_is_of_this_source(monkeypatch, changed):
    """Numba's cache looks at the file of a kernel only, not at those of the functions it calls."""
    before, read = library.edition(), Path.read_bytes
    other = Path(library.__file__).parents[1] / changed
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: read(path) + b"# new" * (path == other))
    library.edition.cache_clear()
    assert library.edition() != before
    library.edition.cache_clear()
