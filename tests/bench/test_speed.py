"""The promises of speed, as ratios within one run: absolute times belong to a machine, and to how busy it is."""

import pytest

import topk_registry as tr
from tests.bench.contest import OURS, Case
from tests.bench.measure import measure
from tests.bench.operators import OPERATORS
from tests.bench.timing import Sample, Spread, interleave, step

pytestmark = pytest.mark.slow

PROMISED = {"difftopk smooth top-k": 12, "pytopk balanced": 8}


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_ours_is_faster_than_the_authors_code_and_pytopk_by_the_promised_factors(tau: float) -> None:
    """difftopk's smooth top-k is the paper's algorithm as its authors published it."""
    case = Case(256, 1000, 5, {"tau": tau})
    chosen = [one for one in OPERATORS["ksubset"].contestants(None) if one.name in {OURS, *PROMISED}]
    rows, _ = measure(case, chosen, repeats=40, limit=120)
    medians = {row.contestant: row.both.median for row in rows if row.both}
    assert {
        name: medians[name] / medians[OURS] for name in PROMISED if medians[name] < PROMISED[name] * medians[OURS]
    } == {}


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_a_low_temperature_costs_no_more_than_a_high_one(scale: float) -> None:
    """At tau = 0.1 and a scale of 10, most odds are below the smallest normal number, which halves a CPU's speed."""
    logits, target = Case(256, 1000, 5).inputs()
    logits = (logits.detach() * scale).requires_grad_()
    losses = {
        "low": tr.create_loss("smooth_topk_svm", k=5, tau=0.1),
        "high": tr.create_loss("smooth_topk_svm", k=5, tau=1.0),
    }
    steps = {name: step(loss, logits, target) for name, loss in losses.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    interleave(steps, {name: [] for name in steps}, repeats=5, limit=60)
    interleave(steps, samples, repeats=100, limit=60)
    low, high = (Spread.of([sum(sample) for sample in samples[name]]) for name in ("low", "high"))
    assert low.median <= 1.3 * high.median
