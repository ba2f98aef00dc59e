"""The compiled CPU kernel: the definition of the operator on noise that is known number by number."""

import importlib
import sys
import warnings

import pytest
import torch

from tests.ops.perturbed.noise import noise
from tests.ops.perturbed.quadrature import expected_kth
from topk_registry import PerturbedTopK
from topk_registry.functional import perturbed_topk
from topk_registry.ops import backend
from topk_registry.ops.perturbed import backends
from topk_registry.ops.perturbed import custom_ops as library
from topk_registry.ops.perturbed.definition import perturbed_topk_definition
from topk_registry.ops.perturbed.numba import backend as cpu
from topk_registry.ops.perturbed.numba import noise as numbers

INF, NAN = float("inf"), float("nan")
NORMAL_ERROR = 1e-9  # of the kernel's inverse of the normal distribution, see test_noise.py
SEED = 0x7EDCBA9876543210


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kernel(scores: torch.Tensor, k: int, epsilon: float, draws: int, seed: int = SEED):
    return cpu.perturbed_kth(scores, torch.tensor(seed), k, epsilon, draws)


def its_noise(scores: torch.Tensor, k: int, draws: int, seed: int = SEED) -> torch.Tensor:
    z = noise(seed, draws, *scores.shape)
    return z if 2 * k <= scores.shape[1] + 1 else -z  # large k is small k of the negative scores


def kind(name: str, rows: int, n: int) -> torch.Tensor:
    s = randn(rows, n, seed=n)
    if name == "tied":
        s = s.round()
    elif name == "flat":
        s = torch.full_like(s, 7.0)
    elif name == "wide":
        s = s * 1000
    elif name == "outlier":
        s[:, n // 2] = 1e6
    elif name == "shifted":
        s = s + 5000
    elif name == "mixed":  # what serves one row as a height does not serve the next
        s = s * torch.logspace(-3, 3, rows, dtype=s.dtype)[:, None] + torch.linspace(-1e4, 1e4, rows)[:, None]
    elif name == "masked":
        s = s.masked_fill(randn(rows, n, seed=1) > 0.5, -INF)
    return s


def check(scores: torch.Tensor, k: int, epsilon: float, draws: int) -> None:
    """Values and classes against the definition on the same noise, in double precision."""
    value, index = kernel(scores, k, epsilon, draws)
    z = its_noise(scores, k, draws)
    wide = scores.double()
    wanted = perturbed_topk_definition(wide, k, epsilon=epsilon, noise=z)
    perturbed = wide + epsilon * z  # [draws, rows, n]
    chosen = perturbed.gather(2, index.T[..., None])[..., 0]
    kth = perturbed.sort(-1, descending=True).values[..., k - 1]
    size = wide.masked_fill(wide.isinf(), 0.0).abs().amax() + 10 * epsilon
    bound = 2 * NORMAL_ERROR * epsilon + 8 * size * 2**-53
    assert value.dtype == scores.dtype
    torch.testing.assert_close(chosen, kth, rtol=0, atol=bound.item())
    torch.testing.assert_close(
        value.double(), wanted, rtol=0, atol=bound.item() + size.item() * torch.finfo(scores.dtype).eps
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [1e-30, 1e-3, 1.0, 50.0, 1e30])
@pytest.mark.parametrize("name", ["normal", "tied", "flat", "wide", "outlier", "shifted", "mixed", "masked"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (2, 2), (15, 3), (16, 16), (70, 5), (333, 1), (333, 300)])
def test_is_the_definition_on_its_noise(n, k, name, epsilon, dtype):
    check(kind(name, 5, n).to(dtype), k, epsilon, draws=3)


@pytest.mark.parametrize(("rows", "n", "k", "draws"), [(3, 9000, 6, 2), (2, 17, 2, 700), (1, 20_000, 200, 3)])
def test_is_the_definition_in_more_calls_than_a_group_has(rows, n, k, draws):
    assert draws * n > 16 * numbers.CALLS_AT_ONCE
    check(randn(rows, n, dtype=torch.float32), k, 1.0, draws)


@pytest.mark.parametrize(("k", "step"), [(1, 0.0), (3, 0.03)])
def test_draws_that_need_a_second_look_are_right(k, step):
    """Fewer than k scores reach the height in one draw of some hundreds, the oftener the lower its row's scores are
    since the height was last moved: in a dozen of these or more."""
    scores = randn(1, 64).repeat(60, 1) - step * torch.arange(60)[:, None]
    check(scores.float(), k, 1.0, draws=300)


def test_wide_seeds_and_rows_count():
    scores = randn(3, 20)
    values = [kernel(scores, 2, 1.0, 2, seed)[0] for seed in (0, 1, 1 << 32, 1 << 62)]
    assert len({tuple(value.tolist()) for value in values}) == 4
    flat = kernel(torch.zeros(500, 20), 2, 1.0, 1)[0]
    assert len(set(flat.tolist())) == 500


@pytest.mark.usefixtures("threads")
def test_neither_other_rows_nor_draws_nor_threads_change_a_bit():
    scores = kind("mixed", 64, 500).float()
    value, index = kernel(scores, 4, 1.0, 5)
    others = scores.clone()
    others[::2] = randn(32, 500, seed=9).float() * 77
    its_value, its_index = kernel(others, 4, 1.0, 5)
    assert torch.equal(its_value[1::2], value[1::2])
    assert torch.equal(its_index[1::2], index[1::2])
    assert torch.equal(kernel(scores[:7], 4, 1.0, 5)[1], index[:7])
    assert torch.equal(kernel(scores, 4, 1.0, 3)[1], index[:, :3])
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        its_value, its_index = kernel(scores, 4, 1.0, 5)
        assert torch.equal(its_value, value)
        assert torch.equal(its_index, index)


def test_every_entry_is_written(monkeypatch):
    new_empty = torch.Tensor.new_empty

    def poisoned(x):
        return x.fill_(NAN if x.is_floating_point() else -1)

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: poisoned(new_empty(*a, **o)))
    scores = torch.randn(9, 100)
    scores[3, 5] = NAN
    value, index = kernel(scores, 4, 1.0, 6)
    assert value.isnan().tolist() == [row == 3 for row in range(9)]
    assert ((index >= 0) & (index < 100)).all()


@pytest.mark.parametrize("where", [0, 70, 99])
@pytest.mark.parametrize("k", [2, 90])
def test_a_nan_row_stays_alone(where, k):
    scores = randn(3, 100)
    clean = kernel(scores, k, 1.0, 4)[0]
    scores[1, where] = NAN
    value = kernel(scores, k, 1.0, 4)[0]
    assert value[1].isnan()
    assert torch.equal(value[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("n", [5, 200])
def test_infinite_scores(n):
    scores = randn(4, n, dtype=torch.float32)
    scores[0, 1], scores[1, :2], scores[2, 3:], scores[3, 2:] = INF, INF, -INF, -INF
    value, index = kernel(scores, 2, 1.0, 6)
    assert value[0].isfinite()
    assert value[1] == INF
    assert index[1].max() < 2
    assert value[2].isfinite()
    assert index[2].max() < 3
    assert value[3].isfinite()
    assert kernel(scores, 3, 1.0, 6)[0][3] == -INF
    assert (kernel(torch.full((2, n), -INF), 2, 1.0, 3)[0] == -INF).all()


@pytest.mark.parametrize("shape", [(0, 6), (3, 6)])
def test_shapes(shape):
    value, index = kernel(torch.zeros(shape), 2, 1.0, 4)
    assert value.shape == shape[:1]
    assert index.shape == (shape[0], 4)


def test_scores_of_any_strides():
    scores = randn(40, 12, dtype=torch.float32)
    assert torch.equal(kernel(scores.T, 3, 1.0, 4)[0], kernel(scores.T.contiguous(), 3, 1.0, 4)[0])
    expanded = scores[0].expand(5, 12)
    assert torch.equal(kernel(expanded, 3, 1.0, 4)[0], kernel(expanded.clone(), 3, 1.0, 4)[0])


@pytest.mark.parametrize("s", [[0.3, -0.2], [1.0, -1.0, 0.5], [0.0, 0.0, 3.0]])
def test_its_mean_is_the_integral(s):
    rows = 100_000
    for k in range(1, len(s) + 1):
        value, chance = expected_kth(s, k, 0.7)
        sample, index = kernel(torch.tensor(s, dtype=torch.float64).expand(rows, -1), k, 0.7, 1, seed=k)
        assert sample.mean().item() == pytest.approx(value, abs=4.5 * sample.std().item() / rows**0.5)
        share = torch.bincount(index[:, 0], minlength=len(s)) / rows
        for one, its in zip(share.tolist(), chance, strict=True):
            assert one == pytest.approx(its, abs=4.5 * (its * (1 - its) / rows) ** 0.5)


@pytest.mark.parametrize(("k", "epsilon"), [(6, 1.0), (6, 0.1), (30, 1.0)])
def test_its_mean_is_that_of_the_torch_path(k, epsilon):
    scores = randn(400).expand(2000, 400)
    options = {"epsilon": epsilon, "num_samples": 5, "generator": torch.Generator().manual_seed(k)}
    ours, theirs = (perturbed_topk(scores, k, impl=impl, **options) for impl in ("numba", "torch"))
    error = ((ours.var() + theirs.var()) / 2000).sqrt().item()
    assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=4.5 * error)
    # the standard deviations of two samples of 2000 differ by sqrt(1/2000) of themselves
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=4.5 * 2000**-0.5)


def test_given_noise_is_taken_by_any_implementation():
    scores, z = randn(3, 30), randn(4, 3, 30, seed=1)
    results = [perturbed_topk(scores, 4, noise=z, num_samples=4, impl=impl) for impl in ("auto", "torch", "numba")]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("epsilon", [0.0, 1e-38, 1e37])
def test_noise_too_small_or_large_to_make_is_torch_s(epsilon):
    scores = randn(3, 30, dtype=torch.float32)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    ours, torchs = (
        perturbed_topk(scores, 4, epsilon=epsilon, impl=impl, generator=one)
        for impl, one in zip(("auto", "torch"), generators, strict=True)
    )
    assert torch.equal(ours, torchs)


def test_the_generator_gives_one_seed_a_call():
    generator, scores = torch.Generator().manual_seed(3), randn(2, 30)
    seeds = [torch.randint(2**63 - 1, (), generator=generator) for _ in range(2)]
    generator.manual_seed(3)
    for seed in seeds:
        wanted, _ = cpu.perturbed_kth(scores, seed, 4, 1.0, 5)
        assert torch.equal(perturbed_topk(scores, 4, generator=generator), wanted)


def test_the_gradient_with_the_seed_fixed_is_the_slope():
    scores = randn(4, 60).requires_grad_()

    def f(s):
        return perturbed_topk(s, 7, num_samples=6, generator=torch.Generator().manual_seed(2)).exp()

    assert torch.autograd.gradcheck(f, (scores,))


@pytest.mark.slow
def test_exported_and_compiled_it_is_one_node_with_the_same_draws():
    module, scores = PerturbedTopK(4), randn(6, 30, dtype=torch.float32)

    def run(f):
        x = scores.clone().requires_grad_()
        torch.manual_seed(0)
        value = f(x)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    with torch.random.fork_rng():
        wanted = run(module)
        program = torch.export.export(module, (scores,))
        nodes = [node for node in program.graph.nodes if "topk_registry" in str(node.target)]
        assert len(nodes) == 1
        for found in (run(program.module()), run(torch.compile(module, fullgraph=True, backend="aot_eager"))):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# the check looks at gradients of tensors that have none
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_it_obeys_torch_s_contract_for_operators():
    scores = randn(5, 40).requires_grad_()
    operator = torch.ops.topk_registry.perturbed_kth.default
    assert library.perturbed_kth._opoverload is operator
    torch.library.opcheck(operator, (scores, torch.tensor(3), 4, 0.5, 3, "numba"))


@pytest.fixture
def forgotten():
    backend.forget_choices()
    yield
    backend.forget_choices()


@pytest.mark.usefixtures("forgotten")
def test_without_numba_the_torch_path_serves_and_that_is_told_once(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"numba is not installed \(pip install numba\): the top-k losses are slower"):
        assert backends.OPERATOR.choose("auto", torch.device("cpu")) == "torch"
    assert backends.OPERATOR.choose("auto", torch.device("cpu")) == "torch"


@pytest.mark.usefixtures("forgotten")
def test_a_numba_that_does_not_work_is_told_of_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "topk_registry.ops.perturbed.numba.backend", None)  # importing it raises
    monkeypatch.delattr(importlib.import_module("topk_registry.ops.perturbed"), "numba", raising=False)
    scores = randn(2, 9)
    with pytest.warns(UserWarning, match=r"numba is installed but cannot be used \(.*\): the top-k losses are slower"):
        first = perturbed_topk(scores, 2, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = perturbed_topk(scores, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first, second)
    assert torch.equal(first, perturbed_topk(scores, 2, generator=torch.Generator().manual_seed(0), impl="torch"))


@pytest.mark.usefixtures("forgotten")
def test_kernels_that_do_not_do_here_what_they_should_are_not_used(monkeypatch):
    cpu = importlib.import_module("topk_registry.ops.perturbed.numba.backend")
    wrong = backends.Kernels(lambda s, *_: (s[:, 0], torch.zeros(len(s), 2, dtype=torch.int64)))
    monkeypatch.setattr(cpu, "kernels", wrong)
    with pytest.warns(UserWarning, match="numba is installed but its kernels cannot be used here.*results are wrong"):
        assert backends.OPERATOR.choose("auto", torch.device("cpu")) == "torch"
    assert backends.OPERATOR.choose("auto", torch.device("cpu")) == "torch"


def test_which_implementation_serves():
    assert backends.OPERATOR.choose("auto", torch.device("cpu")) == "numba"
    assert backends.OPERATOR.choose("auto", torch.device("meta")) == "torch"
    assert backends.OPERATOR.choose("torch", torch.device("cpu")) == "torch"
    with pytest.raises(ValueError, match="impl 'numba' is for scores on the CPU: meta"):
        perturbed_topk(torch.zeros(2, 4, device="meta"), 2, impl="numba")


@pytest.mark.usefixtures("forgotten")
def test_a_recent_gpu_takes_its_kernel_for_rows_that_fit(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(backend, "_problem", lambda one, device, trial: backend.too_old(device))  # no trial without it
    assert backends.OPERATOR.choose("auto", gpu) == "triton"

    class Rows:  # as many as one likes, on a GPU that is not there
        device, dtype = gpu, torch.float32

        def __init__(self, n):
            self.shape = (1, n)

    assert backends.fits(Rows(1000), 5, 1.0, None)
    assert backends.fits(Rows(1000), 1000, 1.0, None)
    assert not backends.fits(Rows(1000), 500, 1.0, None)
    assert not backends.fits(Rows(20000), 5, 1.0, None)
    assert not backends.fits(Rows(1000), 5, 1.0, torch.zeros(1))
    Rows.dtype = torch.float64
    assert not backends.fits(Rows(1000), 5, 1.0, None)
