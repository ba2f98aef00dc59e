"""The GPU kernels of the smooth top-k hinge under Triton's interpreter, against the definition in double precision."""

import pytest
import torch

from tests.ops.ksubset.scores import KINDS, NEARLY_FLAT, nearly_flat, scores
from tests.ops.triton_runs import compiles, interprets, pass_under_the_interpreter
from topk_registry.ops import losses
from topk_registry.ops.gpu import layout
from topk_registry.ops.ksubset.triton import backend
from topk_registry.ops.masses import Masses

INF, NAN = float("inf"), float("nan")
ONE = torch.ones(())
TARGETS = ("label", "smoothed", "two labels", "dense")
# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def rows(n: int, kinds: tuple[str, ...] = KINDS) -> torch.Tensor:
    return torch.cat([scores(kind, n, rows=1) for kind in kinds])


def masses_of(target: str, B: int, n: int) -> Masses:
    """Masses on the first to the last class; not all rows have the same."""
    label = torch.linspace(0, n - 1, B).long()
    share = torch.linspace(0.2, 1.0, B, dtype=torch.float64)
    if target == "label":
        return Masses(label[:, None], share[:, None], None, None)
    if target == "smoothed":
        return Masses(label[:, None], 0.9 * share[:, None], 0.1 / n * share, None)
    if target == "two labels":
        return Masses(torch.stack([label, label.flip(0)], 1), torch.stack([share, 1 - share / 2], 1), None, None)
    g = torch.Generator().manual_seed(n)
    return Masses(None, None, None, torch.rand(B, n, generator=g))


def check(s: torch.Tensor, masses: Masses, k: int, tau: float, alpha: torch.Tensor = ONE) -> None:
    value, gradient = backend.losses(s, masses, k, tau, alpha)
    expected, slope = losses.losses_and_gradient(s.double(), masses, k, tau, alpha.double(), True)
    assert gradient is not None
    scale = masses.table(s.shape[1], torch.float64).sum(1)
    assert ((value - expected).abs() <= 2e-6 * expected.abs().clamp(min=tau) * scale.clamp(min=1)).all()
    rounding = 1e-6 if s.dtype == torch.float32 else 4e-3
    assert ((gradient.double() - slope).abs() <= rounding * scale[:, None].clamp(min=1)).all()


@interprets
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("n", "k", "tau"), [(40, 5, 0.1), (3, 1, 1.0)])
def test_against_the_definition(n, k, tau, target):
    s = rows(n)
    check(s, masses_of(target, len(s), n), k, tau)


@interprets
@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("n", "k", "tau"), [(40, 5, 1e-3), (40, 5, 10.0), (7, 3, 0.1), (65, 10, 0.1), (65, 10, 1.0), (513, 5, 1.0)]
)
def test_against_the_definition_in_other_shapes(n, k, tau, target):
    s = rows(n)
    check(s, masses_of(target, len(s), n), k, tau)


@interprets
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("n", [30, 37])  # in registers; read again from memory, of odd length
def test_rows_in_tiles_and_gaps_per_class(n, target, monkeypatch):
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", 8)
    check(rows(n, ("gaussian", "tied", "outlier")), masses_of(target, 3, n), 4, 0.1, torch.linspace(0, 1, n))


@interprets
@pytest.mark.parametrize("side", [0.9, 1.1])
@pytest.mark.parametrize("kind", NEARLY_FLAT)
def test_rows_on_both_sides_of_flat(kind, side):
    for target in ("label", "dense"):
        check(nearly_flat(kind, 41, 2, side), masses_of(target, 1, 41), 2, 0.5)


@interprets
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    s = rows(40, ("gaussian", "tied", "flat")).to(dtype)
    for target in TARGETS:
        check(s, masses_of(target, 3, 40), 5, 0.1)
    _, gradient = backend.losses(s, masses_of("label", 3, 40), 5, 0.1, ONE)
    assert gradient is not None
    assert gradient.dtype == (torch.float32 if dtype == torch.float16 else dtype)


@interprets
@pytest.mark.parametrize("even", [None, 0.1])
@pytest.mark.parametrize("label", [0, 4])
def test_few_finite_scores_and_nan(label, even):
    def run(row: list[float], share: float) -> tuple[float, list[float]]:
        spread = None if even is None else torch.tensor([even * share])
        parts = Masses(torch.tensor([[label]]), torch.tensor([[share]]), spread, None)
        value, gradient = backend.losses(torch.tensor([row]), parts, 2, 0.5, ONE)
        assert gradient is not None
        return value.item(), gradient[0].tolist()

    few, none = [1.0, -INF, -INF, -INF, -INF], [0.0] * 5
    assert run(few, 1.0) == (INF if label or even else 0.0, none)
    value, gradient = run([1.0, 2.0, NAN, 0.0, 1.0], 1.0)
    assert torch.tensor([value, *gradient]).isnan().all()
    for row in (few, [1.0, 2.0, NAN, 0.0, 1.0], [-INF] * 5):
        assert run(row, 0.0) == (0.0, none)


@interprets
def test_a_row_of_a_table_without_mass_may_hold_nan():
    s, table = torch.tensor([[1.0, NAN, 0.0, 2.0, 3.0]]), torch.zeros(1, 5)
    value, gradient = backend.losses(s, Masses(None, None, None, table), 2, 0.5, ONE)
    assert gradient is not None
    assert value.item() == 0
    assert gradient.count_nonzero() == 0


@interprets
def test_many_labels_and_rows_with_a_stride():
    s = rows(64, ("gaussian", "tied", "outlier"))[:, :41]
    labels = torch.arange(30).view(3, 10)
    check(s, Masses(labels, torch.rand(3, 10, dtype=torch.float64), None, None), 3, 0.2)


@interprets
def test_a_label_that_is_no_class_makes_its_row_nan():
    s = rows(20, ("gaussian", "tied"))
    for even in (None, torch.full((2,), 0.01)):
        parts = Masses(torch.tensor([[20], [3]]), torch.ones(2, 1), even, None)
        value, gradient = backend.losses(s, parts, 2, 0.5, ONE)
        assert gradient is not None
        assert value.isnan().tolist() == [True, False]
        assert gradient.isnan().any(1).tolist() == [True, False]


@compiles
@pytest.mark.slow
def test_pass_under_the_interpreter():
    pass_under_the_interpreter(__file__, "not nightly")


@compiles
@pytest.mark.nightly
def test_other_shapes_pass_under_the_interpreter():
    pass_under_the_interpreter(__file__, "nightly")
