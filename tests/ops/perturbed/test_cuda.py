"""The GPU kernel: k-th largest of scores with noise of its own, on a GPU or under Triton's interpreter."""

import math

import pytest
import torch

from tests.ops.perturbed.quadrature import expected_kth
from tests.ops.triton_runs import (
    DEVICE,
    ON_GPU,
    Launches,
    compiles,
    interprets,
    pass_under_the_interpreter,
    runs_kernels,
)
from topk_registry.ops.perturbed import backends

pytest.importorskip("triton")

from topk_registry.ops.perturbed.triton import backend as cuda

INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's


def seed(number: int = 2**40 + 17) -> torch.Tensor:
    return torch.tensor(number, device=DEVICE)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@runs_kernels
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (5, 3), (5, 5), (40, 6), (40, 35), *([(9000, 30)] * ON_GPU)])
def test_is_the_kth_largest_where_noise_is_small(n, k):
    s = randn(3, n)
    value, index = cuda.perturbed_kth(s, seed(), k, 1e-12, 2)
    wanted, where = (x[:, k - 1] for x in s.sort(1, descending=True))
    assert torch.equal(value, wanted)
    assert torch.equal(index, where[:, None].expand(3, 2))


@runs_kernels
def test_ranks_of_one_draw_are_in_order_and_agree_on_the_noise():
    s = randn(2, 9)
    values, classes = zip(*(cuda.perturbed_kth(s, seed(), k, 0.7, 1) for k in range(1, 10)), strict=True)
    noise = (torch.stack(values, 1) - s.gather(1, torch.cat(classes, 1))) / 0.7
    assert (torch.stack(values, 1).diff() < 0).all()
    assert torch.equal(torch.cat(classes, 1).sort(1).values, torch.arange(9, device=DEVICE).expand(2, 9))
    _, other = zip(*(cuda.perturbed_kth(0 * s, seed(), k, 1.0, 1) for k in range(1, 10)), strict=True)
    # without scores, the order is that of the noise itself
    by_class = noise.scatter(1, torch.cat(classes, 1), noise)
    assert torch.equal(by_class.argsort(1, descending=True), torch.cat(other, 1))


@runs_kernels
def test_noise_is_normal_and_differs_between_rows_draws_and_classes():
    rows, draws = 40, 4
    zeros = torch.zeros(rows, 2, device=DEVICE)
    noise = [torch.cat([cuda.perturbed_kth(zeros, seed(j), k, 1.0, 1)[0] for k in (1, 2)]) for j in range(draws)]
    z = torch.cat(noise).double().sort().values.cpu()
    assert len(z.unique()) == 2 * rows * draws
    # the largest distance of the distributions, by Kolmogorov: 2.2 / sqrt(N) is passed once in 8,000 times
    share = torch.arange(1, len(z) + 1) / len(z)
    assert (0.5 * torch.erfc(-z / math.sqrt(2)) - share).abs().max() <= 2.2 / math.sqrt(len(z))


@runs_kernels
@pytest.mark.parametrize("k", [1, 3])
def test_unbiased(k):
    s, rows = [0.0, 0.3, -1.0, 0.3, 1.0], 20_000 if ON_GPU else 200
    wanted, indicator = expected_kth(s, k, 0.7)
    value, index = cuda.perturbed_kth(torch.tensor(s, device=DEVICE).expand(rows, 5), seed(k), k, 0.7, 1)
    # five standard errors: a true mean lies outside once in two million
    assert value.mean().item() == pytest.approx(wanted, abs=5 * value.std().item() / rows**0.5)
    shares = torch.bincount(index[:, 0], minlength=5) / rows
    for share, chance in zip(shares.tolist(), indicator, strict=True):
        assert share == pytest.approx(chance, abs=5 * (chance * (1 - chance) / rows) ** 0.5 + 1e-9)


@runs_kernels
def test_the_seed_decides():
    s = randn(2, 30)
    first = cuda.perturbed_kth(s, seed(1), 4, 1.0, 3)
    for again, before in zip(cuda.perturbed_kth(s, seed(1), 4, 1.0, 3), first, strict=True):
        assert torch.equal(again, before)
    assert not torch.equal(cuda.perturbed_kth(s, seed(2), 4, 1.0, 3)[0], first[0])
    assert not torch.equal(cuda.perturbed_kth(s, seed(1 + 2**32), 4, 1.0, 3)[0], first[0])
    longer = cuda.perturbed_kth(torch.cat((s, s)), seed(1), 4, 1.0, 3)[0]
    assert torch.equal(longer[:2], first[0])
    assert not torch.equal(longer[2:], first[0])


@runs_kernels
@pytest.mark.parametrize("k", [2, 8])
def test_a_nan_row_is_nan_alone(k):
    s = randn(3, 9)
    clean, _ = cuda.perturbed_kth(s, seed(), k, 1.0, 2)
    s[1, 4] = NAN
    value, index = cuda.perturbed_kth(s, seed(), k, 1.0, 2)
    assert value.isnan().tolist() == [False, True, False]
    assert torch.equal(value[[0, 2]], clean[[0, 2]])
    assert ((index >= 0) & (index < 9)).all()


@runs_kernels
def test_masked_classes_are_never_chosen():
    s = torch.tensor([[0.0, -INF, 1.0, -INF, 0.5], [-INF, -INF, -INF, 1.0, -INF]], device=DEVICE)
    value, index = cuda.perturbed_kth(s, seed(), 3, 1.0, 4)
    assert value[0].isfinite()
    assert not torch.isin(index[0], torch.tensor([1, 3], device=DEVICE)).any()
    assert value[1] == -INF
    assert (s[1, index[1]] == -INF).all()
    last, where = cuda.perturbed_kth(s[:1], seed(), 5, 1.0, 4)  # counted from below
    assert last.item() == -INF
    assert torch.isin(where, torch.tensor([1, 3], device=DEVICE)).all()


@runs_kernels
def test_any_strides_and_an_empty_batch():
    s = randn(9, 4)
    strided, contiguous = (cuda.perturbed_kth(x, seed(), 2, 1.0, 2) for x in (s.T, s.T.contiguous()))
    assert torch.equal(strided[0], contiguous[0])
    value, index = cuda.perturbed_kth(randn(0, 9), seed(), 2, 1.0, 3)
    assert (value.shape, index.shape) == ((0,), (0, 3))


@pytest.mark.slow
@interprets
def test_under_the_interpreter():
    pass_under_the_interpreter(__file__)


@compiles
@pytest.mark.parametrize(("n", "capability"), [(1000, 80), (backends.GPU_LARGEST_N, 90)])
def test_compiles_for_gpus_and_stays_in_registers(n, capability, monkeypatch, tmp_path):
    launches = Launches(monkeypatch)
    cuda.perturbed_kth(torch.zeros(2, n), torch.tensor(0), 6, 1.0, 5)
    (kernel,) = launches.compiled(capability, tmp_path)
    assert kernel.stack <= 32, kernel  # bytes a thread
