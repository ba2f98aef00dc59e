"""What is peculiar to sigmoids with a threshold: steps that must converge, gaps, few scores, long rows."""

import math

import pytest
import torch

from tests.ops.kernels import assert_agree, by_definition, by_kernel
from tests.ops.triton_runs import DEVICE, INTERPRETED, KERNEL_MARKS, interprets, pass_under_the_interpreter
from topk_registry.ops.laplace import laplace_threshold
from topk_registry.ops.threshold.definition import threshold
from topk_registry.rows import soft_topk_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ON_CPU = pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels for GPUs")
BACKENDS = [pytest.param("numba", marks=ON_CPU), pytest.param("triton", marks=KERNEL_MARKS)]


def clusters(g: torch.Generator, n: int, rows: int, device: str = "cpu") -> torch.Tensor:
    """Rows of up to five groups of scores, with gaps of up to thousands between them."""
    centre = torch.randn(rows, 5, generator=g) * 10 ** (4 * torch.rand(rows, 1, generator=g) - 1)
    width = 10 ** (3 * torch.rand(rows, 1, generator=g) - 3)
    group = (torch.rand(rows, n, generator=g) ** 3 * 5).long()
    return (centre.gather(1, group) + width * torch.randn(rows, n, generator=g)).to(device)


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_of_laplace_is_within_log_2(seed):
    g = torch.Generator().manual_seed(seed)
    x = clusters(g, 40, 50).double()
    for k in (0.3, 1, 5, 20, 33.5, 39):
        rounding = 1e-14 * x.abs().amax()
        assert ((threshold(x, k) - laplace_threshold(x, k)).abs() <= math.log(2) + rounding).all()


def test_laplace_is_off_by_log_2_where_scores_are_far():
    """The bound is reached, so that steps begin as far away as the definition takes them to."""
    x = torch.tensor([[0.0] * 40 + [50.0] * 3], dtype=torch.float64)
    off = threshold(x, 3.5) - laplace_threshold(x, 3.5)
    assert abs(off).item() == pytest.approx(math.log(2), abs=0.02)


def test_the_definition_adds_up_to_k():
    g = torch.Generator().manual_seed(0)
    x = clusters(g, 40, 200).double()
    for k in (0.3, 1, 5, 20, 33.5, 39):
        p = torch.sigmoid(x - threshold(x, k)[:, None]).sum(-1)
        rounding = 4 * 2.0**-53 * x.abs().amax(-1) * 40  # of b, times a slope of at most a quarter a class
        assert ((p - k).abs() <= rounding + 1e-13 * k).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [0.3, 1, 3, 17.5, 29])
def test_rows_in_clusters(backend, k):
    """Every step is taken from somewhere: gaps, ties and narrow groups, many rows of them."""
    g = torch.Generator().manual_seed(int(10 * k))
    rows = 1000 if backend == "numba" else 20
    s = clusters(g, 30, rows, "cpu" if backend == "numba" else DEVICE)
    label = torch.randint(30, (rows,), generator=g).to(s.device)
    for tau in (1.0, 0.01):
        loss = soft_topk_rows(k, tau=tau)
        found, wanted = by_kernel(loss, s, label, backend=backend), by_definition(loss, s, label)
        assert found[0].isfinite().all()
        assert_agree(found, wanted, s, tau, 16)


def bisected(x: torch.Tensor, k: float) -> torch.Tensor:
    """The threshold [B] of rows of finite scores by halving, from equation 3 with logarithms of its sides."""
    low, high = x.amin(1) - 50, x.amax(1) + 50
    for _ in range(200):
        b = (low + high) / 2
        u = x - b[:, None]
        more = (u > 0).sum(1) - k
        sides = torch.nn.functional.logsigmoid(-u.abs())
        below = torch.where(u > 0, -torch.inf, sides).logsumexp(1).logaddexp(more.clamp(min=0).log())
        above = torch.where(u > 0, sides, -torch.inf).logsumexp(1).logaddexp((-more).clamp(min=0).log())
        low, high = torch.where(below > above, b, low), torch.where(below > above, high, b)
    return b


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "k", "tau"), [(60, 30, 0.01), (700, 300, 0.01), (700, 699, 0.1), (2049, 1024.5, 0.1)])
def test_hundreds_of_scores_far_apart(backend, n, k, tau):
    """A step of Newton's crosses one of them: 200 steps were too few, and the last was taken for the solution."""
    s = 100 * torch.randn(4, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    s[1, 0], s[2, :2], label = -1e6, torch.tensor([1e6, -1e5]), torch.tensor([5, 6, n - 1, 7])
    s = s.to(DEVICE, torch.float32)
    x = s.cpu().double() / tau
    b, eps = bisected(x, k), torch.finfo(torch.float32).eps
    torch.testing.assert_close(threshold(x, k), b, rtol=1e-12, atol=float(1e-15 * x.abs().amax()))
    exact = torch.nn.functional.softplus(b - x.gather(1, label[:, None])[:, 0], threshold=40.0)
    rounding = eps * x.abs().gather(1, x.sub(b[:, None]).abs().argmin(1, keepdim=True))[:, 0].amax()
    found = by_kernel(soft_topk_rows(k, tau=tau), s, label.to(DEVICE), backend=backend)
    torch.testing.assert_close(found[0].cpu().double(), exact, rtol=8 * eps, atol=float(16 * rounding + 8 * eps))
    wanted = by_definition(soft_topk_rows(k, tau=tau), s, label.to(DEVICE))
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=8 * eps, atol=float(16 * rounding + 8 * eps) / tau)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [2, 3, 100, 257, 1001])
def test_rows_of_any_length(backend, n):
    g = torch.Generator().manual_seed(n)
    s = (3 * torch.randn(3, n, generator=g)).to("cpu" if backend == "numba" else DEVICE)
    label = torch.tensor([0, n - 1, -100]).to(s.device)
    q = torch.softmax(s.flip(0), -1)
    for k in {1, n // 2, n - 0.5}:
        loss = soft_topk_rows(k, tau=0.7)
        for target in (label, q):
            found, wanted = by_kernel(loss, s, target, backend=backend), by_definition(loss, s, target)
            assert_agree(found, wanted, s, 0.7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_few_scores_are_not_ruled_out(backend):
    s = torch.full((3, 9), -torch.inf, device="cpu" if backend == "numba" else DEVICE)
    s[0, :2], s[1, :3], s[2, :4] = 0.0, 0.0, 0.0
    label = torch.zeros(3, dtype=torch.int64, device=s.device)
    loss = soft_topk_rows(3)
    for value, gradient in (by_kernel(loss, s, label, backend=backend), by_definition(loss, s, label)):
        assert value.isnan().tolist() == [True, True, False]
        assert gradient.isnan().any(1).tolist() == [True, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinity_spoils_its_row_alone(backend):
    s = torch.zeros(2, 9, device="cpu" if backend == "numba" else DEVICE)
    s[0, 3] = torch.inf
    label = torch.zeros(2, dtype=torch.int64, device=s.device)
    value, gradient = by_kernel(soft_topk_rows(3), s, label, backend=backend)
    assert value.isnan().tolist() == [True, False]
    assert gradient.isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_without_weight_that_is_ruled_out_costs_nothing(backend):
    s = torch.zeros(1, 9, device="cpu" if backend == "numba" else DEVICE)
    s[0, 0] = -torch.inf  # the weight of the first class is 0
    label = torch.zeros(1, dtype=torch.int64, device=s.device)
    value, gradient = by_kernel(soft_topk_rows(3), s, label, weighted=True, backend=backend)
    assert value.item() == 0
    assert (gradient == 0).all()


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [1e-30, 1e-5, 1e6, 1e30])
def test_temperatures_from_tiny_to_huge(tau, dtype):
    """A loss counts in scores over tau: across a gap it has the rounding of that, and the gradient none of it."""
    pytest.importorskip("numba")
    s = torch.randn(8, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    label = torch.arange(8)
    loss = soft_topk_rows(5, tau=tau)
    value, gradient = by_kernel(loss, s, label, backend="numba")
    wanted, _ = by_definition(loss, s, label)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(value.double(), wanted, rtol=8 * eps, atol=8 * eps * (1 + 1 / tau))
    if tau > 1:
        exact = (0.9 / 50 - 0.9 * torch.eye(50, dtype=torch.float64)[:8]) / tau
    else:
        order = s.sort(-1, descending=True)
        half = 0.5 * torch.zeros(8, 50, dtype=torch.float64).scatter(1, order.indices[:, 4:6], 1.0)
        missed = (s.gather(1, label[:, None]) < order.values[:, 4:5]).double()
        exact = missed * (half - torch.eye(50, dtype=torch.float64)[:8]) / tau
    torch.testing.assert_close(gradient.double(), exact, rtol=8 * eps, atol=(8 * eps + 1 / max(tau, 1e5)) / tau)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outlier", [1e6, 1e12, 1e15, 1e18, 1e30])
@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
def test_one_score_far_above_all_others(tau, outlier, backend):
    """It is chosen, and the threshold for the others is that of k - 1 among them."""
    s = torch.randn(1, 130, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    s[0, 0] = outlier
    loss, label = soft_topk_rows(2, tau=tau), torch.tensor([5], device=DEVICE)
    found, wanted = by_kernel(loss, s, label, backend=backend), by_definition(loss, s, label)
    for one, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5 / tau)


@pytest.mark.slow
@interprets
def test_under_the_interpreter():
    pytest.importorskip("triton")
    pass_under_the_interpreter(__file__)
