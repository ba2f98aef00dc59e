"""The GPU kernels: the definition's results and the torch path's, on a GPU or under Triton's interpreter."""

import pytest
import torch

from tests.ops.kernels import assert_agree, by_definition, by_kernel
from tests.ops.ksubset.hinges import check_hinges
from tests.ops.ksubset.scores import KINDS, NEARLY_FLAT, nearly_flat, scores
from tests.ops.triton_runs import (
    DEVICE,
    ON_GPU,
    Launches,
    compiles,
    interprets,
    pass_under_the_interpreter,
    runs_kernels,
)
from tests.oracles import mp_smooth_svm
from topk_registry.ops import constant
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset import custom_ops, definition, smooth_topk_hinge
from topk_registry.ops.ksubset.torch import backend as composite
from topk_registry.ops.ksubset.torch.backend import kernels as torch_kernels
from topk_registry.ops.ksubset.torch.expected import expected_hinges
from topk_registry.ops.ksubset.torch.rows import State, finish
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses
from topk_registry.rows import smooth_topk_rows

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from topk_registry.ops.gpu import layout  # noqa: E402
from topk_registry.ops.ksubset.triton import backend as cuda  # noqa: E402
from topk_registry.ops.ksubset.triton import chunks  # noqa: E402
from topk_registry.ops.ksubset.triton.hinge import hinge  # noqa: E402

INF, NAN = float("inf"), float("nan")
EPS = torch.finfo(torch.float32).eps
# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
IN_TILES = ("gaussian", "tied", "outlier")  # rows that are searched in every tile, for the longest
LARGE = [(1000, 5), (1000, 10), (20_000, 5)] if ON_GPU else []
LARGE_K = [(1000, 50), (200, 64), (70_000, 20)] if ON_GPU else []


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def every_kind(n: int, kinds: tuple[str, ...] = KINDS) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of each kind, and labels from the first class to the last."""
    s = torch.cat([scores(kind, n, rows=1) for kind in kinds])
    return s.to(DEVICE), torch.linspace(0, n - 1, len(kinds)).long().to(DEVICE)


@pytest.fixture
def in_passes(monkeypatch):
    monkeypatch.setattr(cuda, "ONE_KERNEL_LARGEST_K", 0)
    for powers in ("POWERS", "POWERS_OF_TARGETS"):
        monkeypatch.setattr(cuda, powers, 0)  # no row is flat enough for these


@pytest.fixture
def in_short_passes(monkeypatch, in_passes):
    monkeypatch.setattr(cuda, "SCORES_A_PROGRAM", 16)
    monkeypatch.setattr(cuda, "TILE", 32)


@pytest.fixture
def in_short_tiles(monkeypatch):
    """Tiles of 8 scores, which end within rows and begin where memory is aligned."""
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", 8)


def assert_margins_agree(found, wanted, theta):
    # of the same exact scores: what differs is the rounding of the logarithms, in units of theta
    scale = theta * wanted.div(theta).abs().clamp(min=1.0)
    assert ((found.double() - wanted).abs() <= 40 * EPS * scale).all(), ((found - wanted).abs() / scale).amax(-1)


def check_label_margins(n, k, theta, kinds=KINDS):
    s, label = every_kind(n, kinds)
    margin, gradient = composite.label_margins(s.double(), label, k, theta)
    found, found_gradient = cuda.label_margins(s, label, k, theta)
    assert (found.dtype, found_gradient.dtype) == (torch.float64, torch.float32)
    assert_margins_agree(found, margin, theta)
    assert ((found_gradient - gradient).abs() <= 20 * EPS).all()  # differences of chances of up to one


def check_margins(n, k, theta):
    s, _ = every_kind(n)
    g = randn(*s.shape)
    wanted, found = composite.margins(s.double(), k, theta), cuda.margins(s, k, theta)
    assert_margins_agree(found, wanted, theta)
    product = composite.margins_backward(g.double(), s.double(), k, theta)
    # every class's cotangent is in the sum twice, with opposite signs and a few roundings each: a leader's parts cancel
    allowed = EPS * (20 * g.abs().amax() + 8 * g.norm(dim=1, keepdim=True))
    assert ((cuda.margins_backward(g, s, k, theta) - product).abs() <= allowed).all()


@runs_kernels
@pytest.mark.parametrize(
    ("n", "k", "theta"),
    [
        *((*x, 0.5) for x in [(2, 1), (3, 1), (7, 3), (513, 5)]),
        *((*x, theta) for theta in (1e-3, 0.5, 50.0) for x in [(40, 5), *LARGE]),
    ],
)
def test_label_margins_in_one_kernel(n, k, theta):
    assert k <= cuda.ONE_KERNEL_LARGEST_K
    check_label_margins(n, k, theta)


@runs_kernels
@pytest.mark.usefixtures("in_short_tiles")
@pytest.mark.parametrize(("n", "k"), [(30, 5), (37, 2), (40, 7)])  # in registers; beyond, of odd and even length
def test_label_margins_of_rows_in_tiles(n, k):
    check_label_margins(n, k, 0.5, IN_TILES)


@runs_kernels
@pytest.mark.parametrize("side", [0.9, 1.1])
@pytest.mark.parametrize("kind", NEARLY_FLAT)
@pytest.mark.parametrize(("form", "k"), [(None, 2), ("in_short_tiles", 5)])
def test_flat_rows_and_rows_with_a_small_top_group(kind, side, form, k, request):
    if form:
        request.getfixturevalue(form)
    s, label = nearly_flat(kind, 41, k, side).to(DEVICE), torch.tensor([20], device=DEVICE)
    wanted, wanted_gradient = composite.label_margins(s.double(), label, k, 1.0)
    margin, gradient = cuda.label_margins(s, label, k, 1.0)
    assert_margins_agree(margin, wanted, 1.0)
    assert ((gradient - wanted_gradient).abs() <= 20 * EPS).all()


@runs_kernels
def test_a_program_of_flat_and_other_rows():
    s = torch.cat([nearly_flat("gaussian", 40, 3, side) for side in (0.5, 3.0, 0.9)] + [scores("outlier", 40)])
    s[4, 7] = NAN
    s, label = s.to(DEVICE), torch.tensor([0, 39, 5, 20, 3], device=DEVICE)  # the outlier is a label once
    margin, gradient = cuda.label_margins(s, label, 3, 1.0)
    wanted, wanted_gradient = composite.label_margins(s[:4].double(), label[:4], 3, 1.0)
    assert_margins_agree(margin[:4], wanted, 1.0)
    assert ((gradient[:4] - wanted_gradient).abs() <= 20 * EPS).all()
    assert margin[4].isnan()
    assert gradient[4].isnan().all()


@runs_kernels
@pytest.mark.parametrize(
    ("form", "dtype", "weighted"),
    [(None, torch.float32, False), (None, torch.float16, True), ("in_passes", torch.float32, True)],
)
def test_the_gradient_of_a_weighted_mean_is_written_by_the_kernel(form, dtype, weighted, request):
    if form:
        request.getfixturevalue(form)
    s, label = (3 * randn(3, 30)).to(dtype), torch.tensor([0, 12, 29], device=DEVICE)
    weight = torch.linspace(0.0, 2.0, 30, device=DEVICE) if weighted else None
    of = Hinge(torch.linspace(0, 1, 30, device=DEVICE), 1 / 3, 0.5)
    args = s, label, 3, 1.5, of, weight, 1e-6  # a factor that takes the gradient out of float16's range
    value, gradient = cuda.expected_hinges(*args)
    wide = s.double(), label, 3, 1.5, of._replace(alpha=of.alpha.double()), None if weight is None else weight.double()
    wanted, wanted_gradient = expected_hinges(torch_kernels, *wide, 1e-6)
    assert (value.dtype, gradient.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(value.double(), wanted, rtol=2e-6, atol=0)
    assert ((gradient - wanted_gradient).abs() <= 20 * EPS * wanted_gradient.abs().amax(1, keepdim=True)).all()


@runs_kernels
@pytest.mark.parametrize("form", [None, "in_passes"])
def test_rows_that_are_ignored_cost_nothing(form, request):
    """As a loss that may not look at the labels hands them over: each with its share of the mean."""
    if form:
        request.getfixturevalue(form)
    s, target = randn(4, 12), torch.tensor([3, -100, 11, -100], device=DEVICE)
    s[3, 0] = -INF  # the loss of the label that stands in for one that is ignored
    of, weight = Hinge(torch.ones((), device=DEVICE), 1 / 2, 0.5), torch.linspace(0.5, 2.0, 12, device=DEVICE)
    mixture, _ = Masses.of(target, len(weight), weight=weight).folded("mean")
    value, gradient = cuda.expected_hinges(s, mixture, 2, 1.0, of, weight, 1.0)
    rows = torch.tensor([0, 2])
    share = 1 / weight[target[rows]].sum().item()
    wanted = cuda.expected_hinges(s[rows], target[rows], 2, 1.0, of, weight, share)
    torch.testing.assert_close((value[rows], gradient[rows]), wanted, rtol=1e-6, atol=1e-7)
    assert value[[1, 3]].tolist() == [0, 0]
    assert (gradient[[1, 3]] == 0).all()


@runs_kernels
@pytest.mark.parametrize(
    ("n", "k", "theta", "size", "tile"), [(3, 1, 0.5, 2, 4096), (40, 5, 0.5, 15, 4096), (41, 3, 1e-3, 41, 16)]
)
def test_chunks_of_classes_are_the_row(n, k, theta, size, tile, monkeypatch):
    monkeypatch.setattr(chunks, "TILE", tile)
    s, label = every_kind(n)
    wanted, wanted_gradient = composite.label_margins(s.double(), label, k, theta)
    parts = [(start, s[:, start : start + size].contiguous()) for start in range(0, n, size)]
    state = score = None
    for start, part in parts:
        state, score = chunks.extend(state, score, part, label, k, theta, start)
    assert state is not None
    assert score is not None
    found = finish(State(state.top[:, :n], state.classes[:, :n], state.P), theta)
    assert torch.equal(score, s.gather(1, label[:, None])[:, 0])
    assert_margins_agree(score.double() - found.a.double() + found.shift, wanted, theta)
    g = torch.linspace(-1, 2, len(s), device=DEVICE)
    gradient = torch.cat([chunks.gradient(part, label, found, theta, g, start) for start, part in parts], 1)
    assert ((gradient - g[:, None] * wanted_gradient).abs() <= 40 * EPS).all()


@runs_kernels
def test_a_chunk_with_a_nan_makes_its_row_nan_alone():
    s = randn(3, 20)
    s[1, 7] = NAN
    clean = chunks.summarise(s[::2].contiguous(), 2, 1.0)
    state = chunks.summarise(s, 2, 1.0)
    assert state.P[:, 1].isnan().all()
    for part, of_others in zip(
        (state.top, state.classes, state.P.T), (clean.top, clean.classes, clean.P.T), strict=True
    ):
        assert torch.equal(part[::2], of_others)


@runs_kernels
@pytest.mark.usefixtures("in_passes")
@pytest.mark.parametrize(
    ("n", "k", "theta"), [(2, 1, 1e-3), (40, 5, 0.5), (60, 20, 0.5), *((*x, 0.5) for x in LARGE_K)]
)
def test_label_margins_in_passes(n, k, theta):
    check_label_margins(n, k, theta)


@runs_kernels
@pytest.mark.usefixtures("in_short_passes")
@pytest.mark.parametrize(("k", "theta"), [(1, 0.5), (4, 1e-2)])
def test_label_margins_of_rows_in_segments(k, theta):
    check_label_margins(70, k, theta)


@runs_kernels
@pytest.mark.parametrize("kind", NEARLY_FLAT)
@pytest.mark.parametrize(("form", "n", "k"), [(None, 120, 16), ("in_short_tiles", 200, 25)])
def test_flat_rows_at_large_k_take_one_kernel(kind, form, n, k, request, monkeypatch):
    if form:
        request.getfixturevalue(form)
    limit = cuda.limit_of_flat_rows(k, cuda.POWERS)
    sides = [0.7, 0.98, 1.02, 4.0]  # two flat rows, two others
    s = torch.cat([nearly_flat(kind, n, k, 2 * limit * side) for side in sides]).to(DEVICE)
    label = s.argmin(1)
    s[0, label[0]] = s[0].amax() + 20.0  # a label that leads leaves a flat row
    of_one_kernel, in_passes = [], cuda._label_in_passes

    def watched(s, label, k, theta, value, gradient, done, hinge):
        of_one_kernel.append((done.tolist(), value.clone(), gradient.memory.view(4, n).clone()))
        in_passes(s, label, k, theta, value, gradient, done, hinge)

    monkeypatch.setattr(cuda, "_label_in_passes", watched)
    wanted, wanted_gradient = composite.label_margins(s.double(), label, k, 1.0)
    margin, gradient = cuda.label_margins(s, label, k, 1.0)
    assert_margins_agree(margin, wanted, 1.0)
    assert ((gradient - wanted_gradient).abs() <= 20 * EPS).all()
    ((flat, *before),) = of_one_kernel
    assert flat == [1, 1, 0, 0]
    for x, y in zip(before, (margin, gradient), strict=True):
        assert torch.equal(x[:2], y[:2])


@runs_kernels
def test_hinges_of_all_kinds_of_rows_at_large_k():
    n, k = 120, 16
    s, label = every_kind(n, ("flat", "gaussian", "outlier", "flat", "gaussian"))
    s[3, 7] = NAN
    label[4] = n  # no class
    of, weight = Hinge(torch.linspace(0, 2, n, device=DEVICE), 1 / k, 0.5), torch.linspace(1, 2, n, device=DEVICE)
    value, gradient = cuda.expected_hinges(s, label, k, 1.5, of, weight, 0.25)
    exact = of._replace(alpha=of.alpha.double())
    wanted = expected_hinges(torch_kernels, s[:3].double(), label[:3], k, 1.5, exact, weight.double(), 0.25)
    torch.testing.assert_close(value[:3].double(), wanted[0], rtol=2e-6, atol=1e-30)
    assert ((gradient[:3] - wanted[1]).abs() <= 20 * EPS * wanted[1].abs().amax(1, keepdim=True) + 1e-30).all()
    assert value[3:].isnan().all()
    assert gradient[3:].isnan().all()


@runs_kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("n", [40, 120])  # whose rows may be flat enough for one kernel at 120 alone
def test_ignored_rows_at_large_k(n, smoothing):
    k = 16
    assert (cuda.limit_of_flat_rows(k, cuda.POWERS_OF_TARGETS) * n >= k) == (n == 120)
    s = torch.cat([0.01 * randn(3, n), 3 * randn(2, n, seed=1)])
    label = torch.tensor([0, -100, n - 1, 7, -100], device=DEVICE)
    s[1, 3] = s[4, 0] = NAN  # rows that are not looked at
    loss, options = smooth_topk_rows(k, tau=0.1), {"smoothing": smoothing, "weighted": True, "reduction": "mean"}
    value, gradient = by_kernel(loss, s, label, **options)
    assert (gradient[[1, 4]] == 0).all()
    assert_agree((value, gradient), by_definition(loss, s.nan_to_num(), label, **options), s.nan_to_num(), 1.6, 16)


@pytest.mark.parametrize("k", [16, 20, 64])
def test_a_flat_row_needs_no_more_power_sums(k):
    """Of a row of equal odds: the polynomial of all its power sums is known in closed form."""
    J = 12
    limit = cuda.limit_of_flat_rows(k, J)

    def off(w):  # what the other power sums change c_{k-1} and c_k by, of k / w classes
        n, c, exact = k / w, [1.0], [1.0]
        for j in range(1, k + 1):
            c.append(sum((-1) ** (i - 1) * c[j - i] * n * w**i for i in range(1, min(j, J) + 1)) / j)
            exact.append(exact[-1] * (n - j + 1) * w / j)  # (1 + w X)^n
        return max(abs(x / y - 1) for x, y in zip(c[-2:], exact[-2:], strict=True))

    assert off(limit) < EPS / 4
    assert off(2 * limit) > EPS / 4


@runs_kernels
@pytest.mark.parametrize(
    ("n", "k", "theta"), [(2, 1, 0.5), (3, 1, 1e-3), (7, 3, 50.0), (30, 6, 0.5), *((*x, 0.5) for x in LARGE + LARGE_K)]
)
def test_margins_and_their_gradient(n, k, theta):
    check_margins(n, k, theta)


@runs_kernels
@pytest.mark.usefixtures("in_short_passes")
def test_margins_of_rows_in_segments():
    check_margins(70, 3, 0.1)


@runs_kernels
@pytest.mark.parametrize("tau", [1e-2, 1.0])
@pytest.mark.parametrize("kind", ["gaussian", "tied", "block"])
def test_against_exact_sums(kind, tau):
    s, k, y = scores(kind, 20, rows=1), 4, 3
    loss, gradient = mp_smooth_svm(s[0].tolist(), y, k, tau)
    margin, of_margin = cuda.label_margins(s.to(DEVICE), torch.tensor([y], device=DEVICE), k, k * tau)
    z = (1.0 - margin.cpu() / k) / tau
    assert (tau * torch.nn.functional.softplus(z)).item() == pytest.approx(loss, rel=1e-6)
    exact = torch.tensor(gradient, dtype=torch.float64)
    found = -torch.sigmoid(z) / k * of_margin[0].cpu()
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()


@triton.jit
def store_hinges(
    margin_ptr, label_ptr, alpha_ptr, value_ptr, slope_ptr,
    scale, scale_low, tau, inverse_tau, inverse_tau_low, PER_CLASS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    margin = tl.load(margin_ptr + row)
    alpha = tl.load(alpha_ptr + tl.load(label_ptr + row), mask=margin == margin) if PER_CLASS else tl.load(alpha_ptr)
    value, slope = hinge(margin, alpha, scale, scale_low, tau, inverse_tau, inverse_tau_low)
    tl.store(value_ptr + row, value)
    tl.store(slope_ptr + row, slope)


@runs_kernels
@pytest.mark.parametrize("tau", [1e-36, 1e-3, 0.1, 1.0, 20.0])
@pytest.mark.parametrize("scale", [0.2, -1 / 3])
def test_hinges_are_exact(scale, tau):
    def of_margins(margin, label, of):
        value, slope = torch.empty(2, len(margin), device=DEVICE)
        numbers = cuda._numbers(of.scale, of.tau)
        store_hinges[(len(margin),)](margin, label, of.alpha, value, slope, **numbers, PER_CLASS=of.alpha.ndim > 0)
        return value, slope

    check_hinges(of_margins, scale, tau, DEVICE)


@runs_kernels
@pytest.mark.parametrize("form", [None, "in_passes"])
@pytest.mark.parametrize("per_class", [False, True])
def test_hinges_come_with_margins_and_gradients(form, per_class, request):
    if form:
        request.getfixturevalue(form)
    s, label = every_kind(40)
    alpha = torch.linspace(0, 2, 40) if per_class else torch.tensor(1.0)
    of = Hinge(alpha.to(DEVICE), 1 / 3, 0.2)
    value, gradient = cuda.expected_hinges(s, label, 3, 0.6, of, None, 1.0)
    margin, of_margin = cuda.label_margins(s, label, 3, 0.6)
    wanted, slope = of.definition(margin, label)
    torch.testing.assert_close(value, wanted, rtol=2 * EPS, atol=2e-38)
    torch.testing.assert_close(gradient, slope[:, None] * of_margin, rtol=8 * EPS, atol=2 * EPS)
    label[3] = 40  # no class
    value, gradient = cuda.expected_hinges(s, label, 3, 0.6, of, None, 1.0)
    for found in (value, gradient.sum(1)):
        assert found.isnan().tolist() == [row == 3 for row in range(len(s))]


@runs_kernels
@pytest.mark.usefixtures("in_passes")
def test_against_the_definition():
    s = randn(2, 9)
    log_odds = definition.log_odds_by_recursion(s.cpu(), 3).to(DEVICE)
    torch.testing.assert_close(cuda.margins(s, 3, 1.0).double(), log_odds, rtol=1e-5, atol=1e-6)
    margin, _ = cuda.label_margins(s, torch.tensor([0, 8], device=DEVICE), 3, 1.0)
    torch.testing.assert_close(margin, log_odds[[0, 1], [0, 8]], rtol=1e-6, atol=1e-6)


@runs_kernels
@pytest.mark.parametrize("theta", [5e-38, 1e-36, 1e-12])
def test_temperature_to_zero_is_the_hard_margin(theta):
    s, k, label = 10 * randn(2, 12), 3, torch.tensor([0, 11], device=DEVICE)
    others = s.scatter(1, label[:, None], -INF)
    margin, gradient = cuda.label_margins(s, label, k, theta)
    kth, where = (x[:, -1] for x in others.topk(k))
    torch.testing.assert_close(margin.float(), s.gather(1, label[:, None])[:, 0] - kth)
    hard = torch.zeros_like(s).scatter_(1, label[:, None], 1.0).scatter_(1, where[:, None], -1.0)
    assert torch.equal(gradient, hard)
    assert torch.equal(cuda.margins(s, k, theta).gather(1, label[:, None])[:, 0], margin.float())
    of_label = torch.zeros_like(s).scatter_(1, label[:, None], 1.0)
    assert torch.equal(cuda.margins_backward(of_label, s, k, theta), hard)


ROWS = [
    [0.0, 1.0, 2.0, 3.0, 4.0, 0.5],
    [0.0, 1.0, NAN, 3.0, 4.0, 0.5],  # NaN in the tail or the top group, and where the label is
    [0.0, NAN, 2.0, 3.0, 4.0, 0.5],
    [NAN, 1.0, 2.0, 3.0, 4.0, 0.5],
    [0.0, 1.0, -INF, -INF, 4.0, 0.5],  # left out
    [-INF, 1.0, 2.0, 3.0, 4.0, 0.5],  # the label is
    [0.0, 1.0, 2.0, 3.0, INF, 0.5],
    [0.0, 1.0, -INF, -INF, -INF, -INF],  # too few
    [0.0, 1.0, 2.0, 3.0, 4.0, 0.5],
]


@runs_kernels
@pytest.mark.parametrize("form", [None, "in_passes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_nan_and_infinities(form, dtype, request):
    if form:
        request.getfixturevalue(form)
    s = torch.tensor(ROWS, dtype=dtype, device=DEVICE)
    label = torch.zeros(len(s), dtype=torch.long, device=DEVICE)
    label[8] = 6  # no class
    wanted, wanted_gradient = composite.label_margins(s[:7].double(), label[:7], 2, 1.0)
    margin, gradient = cuda.label_margins(s, label, 2, 1.0)
    bad = torch.tensor([1, 2, 3, 7, 8])
    good = torch.tensor([0, 4, 5, 6])
    assert margin[bad].isnan().all()
    assert gradient[bad].isnan().all()
    torch.testing.assert_close(margin[good], wanted[good], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient[good], wanted_gradient[good].to(dtype))
    assert (gradient[4, 2:4] == 0).all()
    assert margin[5] == -INF


@runs_kernels
def test_margins_of_rows_with_nan_and_infinities():
    s = torch.tensor(ROWS[:3] + ROWS[4:5] + ROWS[7:8], device=DEVICE)
    good, bad = [0, 3], [1, 2, 4]
    found, gradient = cuda.margins(s, 2, 1.0), cuda.margins_backward(torch.sigmoid(randn(5, 6)), s, 2, 1.0)
    torch.testing.assert_close(found[good].double(), composite.margins(s[good].double(), 2, 1.0), rtol=1e-6, atol=1e-6)
    assert gradient[good].isfinite().all()
    assert found[bad].isnan().all()
    assert gradient[bad].isnan().all()


def targets(form: str, label: torch.Tensor, n: int) -> torch.Tensor | LabelMixture:
    if form == "dense":
        return randn(len(label), n, seed=1).softmax(1)
    if form == "smoothed":
        return LabelMixture.smoothed(label, 0.1)
    return LabelMixture.mixed(label, label.flip(0), 0.7)


def check_distributions(s, target, k, tau, *, per_class=False, weighted=False, factor=0.5):
    n = s.shape[1]
    alpha = torch.linspace(0, 2, n, device=DEVICE) if per_class else torch.ones((), device=DEVICE)
    weight = torch.linspace(0.0, 2.0, n, device=DEVICE) if weighted else None
    value, gradient = cuda.expected_hinges(s, target, k, k * tau, Hinge(alpha, 1 / k, tau), weight, factor)
    of, s = Hinge(alpha.double(), 1 / k, tau), s.double()
    exact = s, target, k, k * tau, of, None if weight is None else weight.double(), factor
    wanted, wanted_gradient = expected_hinges(torch_kernels, *exact)
    q = target.dense(n, torch.float64) if isinstance(target, LabelMixture) else target.double()
    q = q * factor if weight is None else q * weight * factor
    assert value.dtype == torch.float32
    # a hinge is a sum of a gap, a distance of scores and a logarithm, which cancel where it is small
    terms = of.alpha + (s.amax(1, keepdim=True) - s) / k + tau * torch.tensor(2.0 * n).log()
    assert ((value - wanted).abs() <= 10 * EPS * ((q * terms).sum(1) + wanted)).all()
    # sums of slopes of up to q / k times chances, which cancel
    assert ((gradient - wanted_gradient).abs() <= 20 * EPS / k * q.sum(1, keepdim=True)).all()


@runs_kernels
@pytest.mark.parametrize(
    ("n", "k", "tau", "form", "options"),
    [
        (3, 1, 1.0, "mixed", {}),
        (40, 5, 0.02, "dense", {}),
        (40, 5, 0.1, "smoothed", {}),
        (40, 4, 3.0, "mixed", {"per_class": True, "weighted": True}),
        *((*x, 0.5, form, {}) for x in LARGE for form in ("dense", "smoothed")),
    ],
)
def test_hinges_of_distributions(n, k, tau, form, options):
    s, label = every_kind(n)
    check_distributions(s, targets(form, label, n), k, tau, **options)


@runs_kernels
@pytest.mark.usefixtures("in_short_tiles")
@pytest.mark.parametrize(
    ("n", "k", "form", "options"),
    [(30, 3, "smoothed", {"per_class": True}), (37, 2, "dense", {"weighted": True}), (36, 4, "mixed", {})],
)
def test_hinges_of_distributions_on_rows_in_tiles(n, k, form, options):
    s, label = every_kind(n, IN_TILES)
    check_distributions(s, targets(form, label, n), k, 0.2, **options)


@runs_kernels
@pytest.mark.usefixtures("in_short_passes")
@pytest.mark.parametrize(("target", "options"), [("dense", {"per_class": True}), ("smoothed", {"weighted": True})])
def test_hinges_of_distributions_in_passes(target, options):
    s, label = every_kind(40)
    check_distributions(s, targets(target, label, 40), 4, 0.5, **options)


@runs_kernels
@pytest.mark.parametrize(
    ("kind", "form", "target", "options"),
    [
        ("gaussian", None, "smoothed", {"per_class": True}),
        ("tied at 3 values", "in_short_tiles", "dense", {"weighted": True}),
        ("2k nearly equal leaders", None, "dense", {}),
    ],
)
def test_hinges_of_distributions_on_flat_rows_at_large_k(kind, form, target, options, request, monkeypatch):
    if form:
        request.getfixturevalue(form)
    n, k, marks, margins = 160, 16, [], cuda._margins
    monkeypatch.setattr(cuda, "_margins", lambda *args: marks.append(args[-1]) or margins(*args))
    limit = cuda.limit_of_flat_rows(k, cuda.POWERS_OF_TARGETS)
    s = torch.cat([nearly_flat(kind, n, k, 2 * limit * side) for side in (0.8, 0.999, 1.001, 4.0)]).to(DEVICE)
    label = torch.tensor([0, 20, n - 1, 7], device=DEVICE)
    check_distributions(s, targets(target, label, n), k, 1 / k, **options)
    assert marks[0].tolist() == [1, 1, 0, 0]


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hinges_of_distributions_at_large_k_of_strided_rows_that_may_be_broken(dtype):
    n, k = 160, 16
    s = (randn(4, n + 3) / 8).to(dtype)[:, 1 : n + 1]
    s[1] *= 40  # not a flat row
    s[3, 5] = NAN
    label, of = torch.tensor([3, 0, n, 4], device=DEVICE), Hinge(torch.ones((), device=DEVICE), 1 / k, 0.5)
    value, gradient = cuda.expected_hinges(s, LabelMixture.smoothed(label, 0.1), k, 8.0, of, None, 0.25)
    assert gradient.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    exact = LabelMixture.smoothed(label[:2], 0.1), k, 8.0, of._replace(alpha=of.alpha.double()), None, 0.25
    wanted, wanted_gradient = expected_hinges(torch_kernels, s[:2].double(), *exact)
    torch.testing.assert_close(value[:2].double(), wanted, rtol=2e-6, atol=0)
    close = {"rtol": torch.finfo(gradient.dtype).eps, "atol": 20 * EPS / k / 4}
    torch.testing.assert_close(gradient[:2].double(), wanted_gradient, **close)
    assert value[2:].isnan().all()
    assert gradient[2:].isnan().all()


@runs_kernels
@pytest.mark.parametrize("side", [0.9, 1.1])
@pytest.mark.parametrize("kind", NEARLY_FLAT)
@pytest.mark.parametrize(("form", "k"), [(None, 2), ("in_short_tiles", 5)])
def test_hinges_of_distributions_on_flat_rows_and_others(kind, side, form, k, request):
    if form:
        request.getfixturevalue(form)
    s = nearly_flat(kind, 41, k, side).to(DEVICE)
    check_distributions(s, targets("dense", torch.tensor([20]), 41), k, 1 / k)


@runs_kernels
@pytest.mark.parametrize("form", [None, "in_short_tiles"])
@pytest.mark.parametrize("side", [0.5, 3.0])
def test_hinges_of_two_labels_that_may_be_one(side, form, request):
    if form:
        request.getfixturevalue(form)
    s = torch.cat([nearly_flat("gaussian", 41, 3, side)] * 2).to(DEVICE)
    label, other = torch.tensor([20, 7], device=DEVICE), torch.tensor([20, s[1].argmax()], device=DEVICE)
    check_distributions(s, LabelMixture.mixed(label, other, 0.7), 3, 1 / 3, weighted=True)


@runs_kernels
@pytest.mark.parametrize(("dtype", "form"), [(torch.bfloat16, "dense"), (torch.float16, "smoothed")])
def test_hinges_of_distributions_in_half_precision(dtype, form):
    s, label = (3 * randn(2, 33)).to(dtype), torch.tensor([0, 32], device=DEVICE)
    s[1] /= 30  # a flat row
    of, target = Hinge(torch.ones((), device=DEVICE), 1 / 3, 0.5), targets(form, label, 33)
    target = target.to(dtype) if isinstance(target, torch.Tensor) else target
    value, gradient = cuda.expected_hinges(s, target, 3, 1.5, of, None, 0.25)
    wide = target.float() if isinstance(target, torch.Tensor) else target
    wanted, wanted_gradient = cuda.expected_hinges(s.float(), wide, 3, 1.5, of, None, 0.25)
    assert gradient.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, wanted_gradient.to(gradient.dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@runs_kernels
def test_hinges_of_distributions_where_scores_are_no_numbers():
    s = torch.tensor(ROWS[:3] + ROWS[4:5] + ROWS[7:], device=DEVICE)
    label = torch.zeros(6, dtype=torch.long, device=DEVICE)
    label[5] = 6  # no class
    of = Hinge(torch.ones((), device=DEVICE), 1 / 2, 1.0)
    target = LabelMixture(torch.stack((torch.zeros_like(label), label), 1), torch.full((6, 2), 0.5, device=DEVICE))
    value, gradient = cuda.expected_hinges(s, target, 2, 2.0, of, None, 1.0)
    assert value.isnan().tolist() == [False, True, True, False, True, True]
    assert gradient.isnan().all(1).tolist() == value.isnan().tolist()
    good = torch.tensor([0, 3])
    for found, wanted in zip((value, gradient), cuda.expected_hinges(s, label, 2, 2.0, of, None, 1.0), strict=True):
        torch.testing.assert_close(found[good], wanted[good], rtol=1e-6, atol=1e-6)
    smoothed = cuda.expected_hinges(s[3:4], LabelMixture.smoothed(label[:1], 0.1), 2, 2.0, of, None, 1.0)
    assert smoothed[0].item() == INF  # classes that are left out have mass
    assert smoothed[1].isfinite().all()


@runs_kernels
@pytest.mark.parametrize("form", [None, "in_short_passes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(form, dtype, request):
    if form:
        request.getfixturevalue(form)
    s, label = (2 * randn(3, 50)).to(dtype), torch.tensor([0, 20, 49], device=DEVICE)
    margin, gradient = cuda.label_margins(s, label, 4, 0.7)
    wanted, wide = cuda.label_margins(s.float(), label, 4, 0.7)
    assert gradient.dtype == dtype
    torch.testing.assert_close(margin, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wide.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_margins(dtype):
    s, g = (2 * randn(2, 20)).to(dtype), randn(2, 20, seed=1)
    assert torch.equal(cuda.margins(s, 3, 0.7), cuda.margins(s.float(), 3, 0.7))
    product = cuda.margins_backward(g, s, 3, 0.7)
    assert product.dtype == dtype
    wide = cuda.margins_backward(g, s.float(), 3, 0.7)
    torch.testing.assert_close(product, wide.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@runs_kernels
@pytest.mark.parametrize("form", [None, "in_passes", "in_short_passes"])
def test_every_entry_is_written(form, request, monkeypatch):
    if form:
        request.getfixturevalue(form)
    new_empty, empty, empty_like = torch.Tensor.new_empty, torch.empty, torch.empty_like

    def poisoned(x):
        return x.fill_(NAN if x.is_floating_point() else -7)

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: poisoned(new_empty(*a, **o)))
    monkeypatch.setattr(torch, "empty", lambda *a, **o: poisoned(empty(*a, **o)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **o: poisoned(empty_like(*a, **o)))
    s, label = randn(2, 40), torch.tensor([0, 39], device=DEVICE)
    results = *cuda.label_margins(s, label, 3, 1.0), cuda.margins(s, 3, 1.0), cuda.margins_backward(s, s, 3, 1.0)
    target, of = LabelMixture.smoothed(label, 0.1), Hinge(torch.ones((), device=DEVICE), 1 / 3, 1.0)
    results = *results, *cuda.expected_hinges(s, target, 3, 3.0, of, None, 1.0)
    assert all(x.isfinite().all() for x in results)


@runs_kernels
def test_rows_do_not_depend_on_each_other():
    s, label = randn(5, 70), torch.tensor([0, 9, 69, 3, 7], device=DEVICE)
    spoilt = s.clone()
    spoilt[1, 3] = NAN

    def results(rows, label):
        product = cuda.margins_backward(rows.nan_to_num().cos(), rows, 3, 0.7)
        return *cuda.label_margins(rows, label, 3, 0.7), cuda.margins(rows, 3, 0.7), product

    for whole, alone in zip(results(spoilt, label), results(s[4:], label[4:]), strict=True):
        assert torch.equal(whole[4:], alone)


@runs_kernels
def test_cotangents_of_any_strides():
    s, g = randn(2, 9), randn(9, 2)
    assert torch.equal(cuda.margins_backward(g.T, s, 2, 1.0), cuda.margins_backward(g.T.contiguous(), s, 2, 1.0))


@pytest.fixture
def reads(monkeypatch):
    """Let these kernels serve the public functions; gives the addresses of the scores that they read."""
    found, launch = set(), cuda.launch

    def recorded(kernel, grid, s, *args, **options):
        found.add(s.data_ptr())
        launch(kernel, grid, s, *args, **options)

    monkeypatch.setattr(cuda, "launch", recorded)
    monkeypatch.setattr(constant, "choose", lambda op, impl, *request: "triton" if impl == "auto" else impl)
    return found


STRIDED = {
    "labels": lambda label, n: (label, {}),
    "weighted labels": lambda label, n: (label, {"weight": torch.linspace(0, 2, n, device=DEVICE)}),
    "distribution": lambda label, n: (randn(len(label), n + 1, seed=1).softmax(1)[:, 1:], {"reduction": "mean"}),
    "mixture": lambda label, n: (LabelMixture.mixed(label, label.flip(0), 0.7, 0.1), {"reduction": "sum"}),
}


@runs_kernels
@pytest.mark.parametrize(
    ("form", "n", "longer", "kind", "dtype"),
    [
        (None, 40, 43, "labels", torch.float32),
        ("in_passes", 40, 43, "weighted labels", torch.float32),
        ("in_short_tiles", 37, 40, "labels", torch.bfloat16),
        ("in_short_tiles", 37, 41, "distribution", torch.float32),
        ("in_short_tiles", 40, 48, "mixture", torch.float32),
    ],
)
def test_strided_rows_are_read_where_they_lie(form, n, longer, kind, dtype, request, reads):
    if form:
        request.getfixturevalue(form)
    whole, label = (2 * randn(4, longer)).to(dtype), torch.tensor([0, n - 1, 7, 20], device=DEVICE)
    whole[1:3] /= 10  # flat rows, and others
    target, options = STRIDED[kind](label, n)

    def loss_and_gradient(s, impl):
        s = s.detach().requires_grad_()
        loss = smooth_topk_hinge(s, target, 3, tau=0.5, impl=impl, **options)
        return loss, *torch.autograd.grad(loss.sum(), s)

    s = whole[:, 2 : 2 + n]
    loss, gradient = loss_and_gradient(s, "auto")
    assert s.data_ptr() in reads
    wanted, wanted_gradient = loss_and_gradient(s.float(), "torch")
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=1e-6)
    # rounded to the dtype of the scores: the gradient of the margin, the slope, and their product
    torch.testing.assert_close(gradient.float(), wanted_gradient, rtol=1.5 * torch.finfo(dtype).eps, atol=2e-6)


@runs_kernels
@pytest.mark.parametrize("view", [lambda s: s[:, 2:], lambda s: s[:, 2:].T.contiguous().T])
def test_margins_of_rows_at_any_stride(view, reads):
    s, label, g = view(randn(2, 11)), torch.tensor([0, 8], device=DEVICE), randn(2, 9, seed=1)
    args = s.contiguous(), 2, 0.5
    assert torch.equal(cuda.margins(s, 2, 0.5), cuda.margins(*args))
    assert torch.equal(cuda.margins_backward(g, s, 2, 0.5), cuda.margins_backward(g, *args))
    assert (s.data_ptr() in reads) == (s.stride(1) == 1)
    tests = "test_schema", "test_faketensor"  # strides of results too, on which compiled graphs rely
    for op, args in (
        (custom_ops.label_margins, (s, label, 2, 0.5, "triton")),
        (custom_ops.margins, (s, 2, 0.5, "triton")),
        (custom_ops._margins_backward, (g, s, 2, 0.5, "triton")),
    ):
        torch.library.opcheck(op, args, test_utils=tests)


@runs_kernels
def test_an_empty_batch():
    s = randn(0, 9)
    margin, gradient = cuda.label_margins(s, torch.zeros(0, dtype=torch.long, device=DEVICE), 2, 1.0)
    assert (margin.shape, gradient.shape, cuda.margins(s, 2, 1.0).shape) == ((0,), (0, 9), (0, 9))
    assert cuda.margins_backward(s, s, 2, 1.0).shape == (0, 9)
    value, gradient = cuda.expected_hinges(s, s, 2, 1.0, Hinge(torch.ones((), device=DEVICE), 0.5, 0.5), None, 1.0)
    assert (value.shape, gradient.shape) == ((0,), (0, 9))


@pytest.mark.slow
@interprets
def test_under_the_interpreter():
    pass_under_the_interpreter(__file__)


@compiles
@pytest.mark.parametrize(
    ("n", "k", "dtype", "capability"),
    [
        (1000, 5, torch.float32, 90),
        (1000, 5, torch.bfloat16, 80),
        (16_384, 10, torch.bfloat16, 90),
        (21_841, 5, torch.bfloat16, 90),
        (21_841, 40, torch.float32, 80),
    ],
)
@pytest.mark.slow
def test_compiles_for_gpus_and_stays_in_registers(n, k, dtype, capability, monkeypatch, tmp_path):
    launches = Launches(monkeypatch)
    s, label = torch.zeros(2, n, dtype=dtype), torch.zeros(2, dtype=torch.long)
    cuda.label_margins(s, label, k, 1.0)
    cuda.expected_hinges(s, label, k, 1.0, Hinge(torch.ones(n), 0.2, 0.1), None, 1.0)
    if capability == 90 and n == 21_841:
        state = chunks.summarise(s, k, 1.0)
        chunks.gradient(s, label, finish(state, 1.0), 1.0, torch.ones(2))
        of = Hinge(torch.ones(()), 1 / k, 0.1)
        cuda.expected_hinges(s, LabelMixture.mixed(label, label, 0.7, 0.1), k, k * 0.1, of, None, 1.0)
    if k == 5:
        cuda.margins(s, k, 1.0)
        cuda.margins_backward(s.float(), s, k, 1.0)
    for kernel in launches.compiled(capability, tmp_path):
        assert kernel.stack <= 32, kernel  # bytes a thread
