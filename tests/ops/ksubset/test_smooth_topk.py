"""The smooth top-k hinge over masses, by every backend of this machine, against numbers of many digits."""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.ksubset.scores import KINDS, scores
from tests.oracles import smooth_svm_over_masses
from topk_registry import use_backend
from topk_registry.functional import smooth_topk
from topk_registry.ops.masses import Masses

BACKENDS = ("numba", "torch")
MASSES = ("label", "smoothed label", "two labels", "few dense", "dense")


@pytest.fixture(params=BACKENDS)
def backend(request):
    with use_backend(request.param):
        yield request.param


def masses_of(kind: str, B: int, n: int) -> Masses:
    g = torch.Generator().manual_seed(n)
    labels, shares = torch.randint(n, (B, 2), generator=g), torch.rand(B, 2, generator=g, dtype=torch.float64)
    table = torch.rand(B, n, generator=g)
    if kind == "label":
        return Masses(labels[:, :1], shares[:, :1], None, None)
    if kind == "smoothed label":
        return Masses(labels[:, :1], shares[:, :1], torch.full((B,), 0.1 / n, dtype=torch.float64), None)
    if kind == "two labels":
        return Masses(labels, shares, None, None)
    return Masses(None, None, None, torch.where(table < 3 / n, table, 0.0) if kind == "few dense" else table)


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        (torch.zeros(2, 5), {"k": 0}, "k must be an integer from 1 to n - 1 = 4, got 0"),
        (torch.zeros(2, 5), {"k": 5}, "k must be an integer"),
        (torch.zeros(2, 5), {"k": True}, "k must be an integer"),
        (torch.zeros(2, 5), {"k": 2, "tau": 0.0}, "temperature"),
        (torch.zeros(2, 5), {"k": 2, "tau": math.inf}, "temperature"),
        (torch.zeros(2, 5, dtype=torch.int64), {"k": 2}, "floating point"),
        (torch.zeros(2, 5).to_sparse(), {"k": 2}, "dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_errors(backend, logits, options, message):
    with pytest.raises(ValueError, match=message):
        smooth_topk(logits, masses_of("label", 2, 5), **options)


def value_and_gradient(s: Tensor, masses: Masses, **options) -> tuple[Tensor, Tensor]:
    leaf = s.detach().clone().requires_grad_()
    losses = smooth_topk(leaf, masses, **options)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def assert_exact(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        size = other.abs().reshape(len(other), -1).amax(1).clamp_min(1e-30).reshape(-1, *[1] * (other.ndim - 1))
        assert float(((one.double() - other) / size).abs().max()) < tolerance


@pytest.mark.parametrize("masses", MASSES)
@pytest.mark.parametrize(("n", "k"), [(2, 1), (13, 5), pytest.param(40, 12, marks=pytest.mark.slow)])
def test_losses_and_gradients_have_all_digits(backend, masses, n, k):
    given = masses_of(masses, len(KINDS), n)
    s = torch.cat([scores(kind, n, rows=1) for kind in KINDS])
    alpha = torch.linspace(0, 2, n, dtype=torch.float64)
    for tau in (0.1, 3.0):
        for gap in (torch.tensor(1.0), alpha):
            expected = smooth_svm_over_masses(s, given.table(n, torch.float64), k, tau, gap)
            assert_exact(value_and_gradient(s, given, k=k, tau=tau, alpha=gap), expected, 1e-5)
    if backend == "torch":
        found = value_and_gradient(s.double(), given, k=k, tau=tau, alpha=alpha)
        assert_exact(found, expected, 1e-9)


@pytest.mark.parametrize("masses", MASSES)
def test_the_sum_is_that_of_the_losses(backend, masses):
    s = torch.randn(50, 13, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = masses_of(masses, 50, 13)
    losses, gradient = value_and_gradient(s, given, k=3)
    for _ in range(2):
        total = smooth_topk(s, given, k=3, sums=True)
        torch.testing.assert_close(total.detach(), losses.sum(), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(torch.autograd.grad(total, s)[0], gradient)


@pytest.mark.parametrize("tau", [1e-4, 1e-2, 10.0, 1e3])
def test_extreme_temperatures(backend, tau):
    s, given = torch.cat([scores(kind, 30, rows=1) for kind in KINDS]), masses_of("label", len(KINDS), 30)
    expected = smooth_svm_over_masses(s, given.table(30, torch.float64), 3, tau, torch.tensor(1.0))
    assert_exact(value_and_gradient(s, given, k=3, tau=tau, alpha=1.0), expected, 1e-5)


@pytest.mark.parametrize("masses", MASSES)
@pytest.mark.parametrize(("n", "k"), [(300, 1), (300, 10), (1000, 5), (1000, 64), (5000, 5)])
def test_backends_agree_on_long_rows(masses, n, k):
    s, given = torch.randn(19, n, generator=torch.Generator().manual_seed(0)) * 2, masses_of(masses, 19, n)
    for tau in (0.1, 1.0):
        with use_backend("torch"):
            expected = value_and_gradient(s.double(), given, k=k, tau=tau)
        assert_exact(value_and_gradient(s, given, k=k, tau=tau), expected, 5e-6 if k <= 20 else 3e-5)


@pytest.mark.parametrize("masses", ["label", "smoothed label"])
def test_rows_without_mass_nan_and_few_finite_scores(backend, masses):
    s, n = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)), 12
    given = masses_of(masses, 6, n)
    labels = torch.zeros_like(given.labels)
    shares, even = given.shares.clone(), given.even
    s[0, 3] = s[2, 5] = math.nan
    shares[0] = 0
    even = None if even is None else even.index_fill(0, torch.tensor([0]), 0.0)
    s[1, 4:] = -math.inf  # k finite scores, the label among them
    s[3, 7] = -math.inf
    s[4, 0] = -math.inf
    losses, gradient = value_and_gradient(s, Masses(labels, shares, even, None), k=4, tau=0.1)
    assert losses[0] == 0
    assert not gradient[0].any()
    assert losses[2].isnan()
    assert gradient[2].isnan().any()
    assert losses[4] == math.inf  # the label cannot be in the set
    assert losses[1] == (0 if masses == "label" else math.inf)
    if masses == "label":
        assert not gradient[1].any()
        assert gradient[3, 7] == 0
    clean = value_and_gradient(
        s[[3, 5]], Masses(*(None if p is None else p[[3, 5]] for p in (labels, shares, even, None))), k=4, tau=0.1
    )
    torch.testing.assert_close((losses[[3, 5]], gradient[[3, 5]]), clean)


@pytest.mark.parametrize("masses", ["label", "smoothed label"])
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
@pytest.mark.parametrize("others", [1.0, -math.inf, math.inf])
@pytest.mark.parametrize(("n", "k"), [(70, 3), (10, 7)])
def test_a_nan_of_either_sign(backend, masses, nan, others, n, k):
    s = torch.full((1, n), others)
    s[0, 0], s[0, 9] = 0.0, nan
    given = masses_of(masses, 1, n)
    losses, gradient = value_and_gradient(s, given._replace(labels=torch.zeros_like(given.labels)), k=k, tau=0.1)
    assert losses.isnan().all()
    assert gradient.isnan().any()


@pytest.mark.parametrize("masses", ["label", "smoothed label", "distribution"])
@pytest.mark.parametrize("k", [13, 20, 40])
def test_powers_of_odds_in_the_tail_do_not_overflow(backend, masses, k):
    """One class is far ahead, k - 2 classes follow, and the many others make the tilt small."""
    n = 20_000
    s = torch.randn(1, n, generator=torch.Generator().manual_seed(0)) / 4
    s[0, : k - 1] = torch.linspace(5.0, 6.0, k - 1)
    s[0, 7] = 12.0
    given = masses_of(masses, 1, n)
    with use_backend("torch"):
        expected = value_and_gradient(s.double(), given, k=k, tau=1 / k)
    assert expected[0].isfinite().all()
    assert_exact(value_and_gradient(s, given, k=k, tau=1 / k), expected, 3e-5)


def test_half_precision_strides_and_views(backend):
    s, given = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)), masses_of("label", 8, 50)
    expected = value_and_gradient(s, given, k=5, tau=0.3)
    wide = torch.randn(8, 90)
    wide[:, 20:70] = s
    for view in (wide[:, 20:70], s.t().contiguous().t(), torch._neg_view(-s)):
        torch.testing.assert_close(value_and_gradient(view, given, k=5, tau=0.3), expected, rtol=1e-6, atol=1e-7)
    for dtype in (torch.float16, torch.bfloat16):
        losses, gradient = value_and_gradient(s.to(dtype).float(), given, k=5, tau=0.3)
        found = value_and_gradient(s.to(dtype), given, k=5, tau=0.3)
        torch.testing.assert_close(found, (losses.float(), gradient.to(dtype)))
    doubled = Masses(given.labels.repeat(1, 2)[:, ::2][:, :1], given.shares.flip(0).flip(0), None, None)
    torch.testing.assert_close(value_and_gradient(s, doubled, k=5, tau=0.3), expected)


def test_empty_batches(backend):
    losses, gradient = value_and_gradient(torch.zeros(0, 9), masses_of("label", 0, 9), k=2)
    assert losses.shape == (0,)
    assert gradient.shape == (0, 9)


def test_cotangents_and_repeated_backward_passes(backend):
    s, given = torch.randn(4, 20, requires_grad=True), masses_of("smoothed label", 4, 20)
    g = torch.tensor([1.0, -2.0, 0.0, 3.0])
    losses = smooth_topk(s, given, k=3)
    first = torch.autograd.grad(losses, s, g, retain_graph=True)[0].clone()
    again = torch.autograd.grad(losses, s, g, retain_graph=True)[0].clone()
    scaled = torch.autograd.grad((2 * losses).sum(), s)[0]
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first, scaled / 2 * g[:, None])


def test_second_derivatives(backend):
    given = masses_of("smoothed label", 3, 8)
    s = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: smooth_topk(x, given, k=2, tau=0.5), s)
    single = s.detach().float().requires_grad_()
    results = []
    for leaf in (s, single):
        (first,) = torch.autograd.grad(smooth_topk(leaf, given, k=2, tau=0.5).sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(results[1].double(), results[0], rtol=1e-4, atol=1e-6)


def test_transforms_and_learned_masses():
    s, given = torch.randn(4, 20), masses_of("label", 4, 20)
    expected = value_and_gradient(s, given, k=3)

    def loss(row: Tensor, label: Tensor, share: Tensor) -> Tensor:
        return smooth_topk(row[None], Masses(label[None], share[None], None, None), k=3)[0]

    gradients, losses = torch.func.vmap(torch.func.grad_and_value(loss))(s, given.labels, given.shares)
    torch.testing.assert_close((losses, gradients), expected)
    q = torch.rand(4, 20, requires_grad=True)
    losses = smooth_topk(s, Masses(None, None, None, q), k=3)
    (of_q,) = torch.autograd.grad(losses.sum(), q)
    torch.testing.assert_close((of_q * q).sum(1), losses)  # it is linear in the masses


@pytest.mark.slow
@pytest.mark.parametrize("masses", ["label", "smoothed label", "dense"])
def test_a_compiled_graph_stays_whole(masses):
    given, s = masses_of(masses, 6, 30), torch.randn(6, 30)

    def loss(s: Tensor, labels, shares, even, dense) -> Tensor:
        return smooth_topk(2 * s, Masses(labels, shares, even, dense), k=4, tau=0.2).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = s.clone().requires_grad_()
        value = function(leaf, *given[:4])
        results.append((value, *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(*results)


def test_the_operator_is_registered_right():
    given = masses_of("smoothed label", 3, 10)
    args = (torch.randn(3, 10, requires_grad=True), *given[:4], torch.tensor(1.0, dtype=torch.float64), 2, 0.5)
    torch.library.opcheck(torch.ops.topk_registry.smooth_topk, args, test_utils=("test_schema", "test_faketensor"))


def test_the_operator_returns_a_contiguous_gradient_as_the_compiler_expects(monkeypatch):
    def kernel(s, *rest):  # the GPU kernel returns a gradient in the memory layout of the scores
        return s.sum(1), torch.zeros(len(s), 16)[:, : s.shape[1]]

    monkeypatch.setattr("topk_registry.ops.losses._kernel", lambda backend: kernel)
    given = masses_of("label", 3, 10)
    _, gradient = torch.ops.topk_registry.smooth_topk(torch.randn(3, 10), *given[:4], torch.ones(()), 2, 0.5)
    assert gradient.is_contiguous()


def test_results_do_not_depend_on_threads_or_neighbours(backend, threads):
    s, given = torch.randn(70, 300), masses_of("smoothed label", 70, 300)
    torch.set_num_threads(2)
    both = value_and_gradient(s, given, k=5, tau=0.1)
    torch.set_num_threads(1)
    for one, other in zip(value_and_gradient(s, given, k=5, tau=0.1), both, strict=True):
        assert torch.equal(one, other)
    alone = value_and_gradient(s[7:8], given.rows(slice(7, 8)), k=5, tau=0.1)
    torch.testing.assert_close(alone[1], both[1][7:8], rtol=1e-6, atol=1e-8)


def test_gap_per_class_must_match_the_classes():
    s = torch.randn(2, 6)
    with pytest.raises(ValueError, match="alpha"):
        smooth_topk(s, masses_of("label", 2, 6), k=2, alpha=torch.ones(5))
