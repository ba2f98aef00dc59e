"""Means, intervals, verdicts."""

# values of tables and attributes of studies are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import math
import random

import mpmath
import pytest

from topk_studies.engine.statistics import LOOKS, Claim, difference, estimate, judge, settle, share_of_alpha, t_quantile


@pytest.mark.parametrize("df", range(1, 31))
def test_quantiles_are_students(df):
    def beyond(t):  # two tails, by the incomplete beta function
        return mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True) - 0.05

    found = t_quantile(0.975, df)
    assert found == pytest.approx(float(mpmath.findroot(beyond, found)), rel=1e-9)


def test_an_interval_by_hand():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3))
    assert (found.count, found.low, found.high) == (3, found.mean - found.half_width, found.mean + found.half_width)


def test_one_run_has_no_interval_and_none_no_estimate():
    assert math.isnan(estimate([5.0]).half_width)
    assert str(estimate([5.0])) == "5.00"
    assert estimate([]) is None


def test_differences_are_paired_by_seed():
    gap = difference({0: 3.0, 1: 5.0, 7: 100.0}, {1: 4.0, 0: 1.0})
    assert (gap.mean, gap.count) == (1.5, 2)
    assert difference({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.0], "agrees"),
        ([-1.0, -1.1, -0.9, -1.0, -1.0], "differs"),
        ([1.0, -1.0, 0.1, -0.1, 1.0], "open"),
        ([1.0, 1.1, 0.9, 1.0], "open"),  # four seeds decide nothing, however alike
        ([1.0], "open"),
    ],
)
def test_a_verdict_needs_five_seeds_and_an_interval_that_excludes_zero(values, verdict):
    note = judge("claim", estimate(values), "a less b")
    assert note.verdict == verdict
    assert note.evidence.startswith(f"a less b: {sum(values) / len(values):+.2f}")


def test_what_was_not_measured_is_open():
    assert judge("claim", None, "a less b").verdict == "open"


def test_no_difference_is_a_verdict_too():
    note = judge("claim", estimate([0.1, -0.1, 0.05, -0.05, 0.0]), "a less b")
    assert note.verdict == "same"
    assert note.evidence.endswith("no difference larger than 1")
    assert judge("claim", estimate([0.1, -0.1, 0.05, -0.05, 0.0]), "a less b", effect=0.05).verdict == "open"


@pytest.mark.parametrize(
    ("shift", "spread", "verdict"),
    [(0.0, 0.1, "agrees"), (0.5, 0.1, "agrees"), (3.0, 0.1, "differs"), (-3.0, 0.1, "differs"), (1.0, 0.1, "open")],
)
def test_a_claim_of_no_difference_holds_where_the_interval_is_small(shift, spread, verdict):
    differences = dict(enumerate(shift + spread * place for place in (-1.0, -0.5, 0.0, 0.5, 1.0)))
    (note,) = settle([Claim("c", differences, "a less b", none=True)])
    assert note.verdict == verdict
    assert note.evidence.endswith("no difference larger than 1") == (verdict == "agrees")


def test_the_levels_of_all_looks_and_claims_add_up():
    assert sum(share_of_alpha(look, 7) for look in LOOKS) * 7 == pytest.approx(0.05)
    assert share_of_alpha(3, 1) == share_of_alpha(LOOKS[0], 1)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.slow
def test_looking_again_and_again_decides_wrongly_in_one_study_of_twenty_at_most(count):
    """Where there is no difference, added seeds find one in at most 5 % of the studies."""
    draw, studies = random.Random(0), 1000
    wrong = 0
    for _ in range(studies):
        values = [[draw.gauss(0, 3) for _ in range(LOOKS[-1])] for _ in range(count)]
        looks = ([Claim("c", dict(enumerate(v[:look])), "a less b") for v in values] for look in LOOKS)
        wrong += any(note.verdict in ("agrees", "differs") for claims in looks for note in settle(claims))
    assert wrong / studies <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)
    assert wrong > 0  # the bound is used


def test_forty_seeds_decide_what_five_leave_open():
    draw = random.Random(1)
    values = dict(enumerate(draw.gauss(1.0, 1.2) for _ in range(40)))
    few = {seed: values[seed] for seed in range(5)}
    assert [note.verdict for note in settle([Claim("c", few, "a"), Claim("c", values, "a")])] == ["open", "agrees"]
