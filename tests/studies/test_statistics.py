"""Means, intervals, verdicts."""

import math

import mpmath
import pytest

from topk_studies.engine.statistics import T975, difference, estimate, judge


@pytest.mark.parametrize("df", range(1, len(T975) + 1))
def test_quantiles_are_students(df):
    def beyond(t):  # two tails, by the incomplete beta function
        return mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True) - 0.05

    assert T975[df - 1] == pytest.approx(float(mpmath.findroot(beyond, T975[df - 1])), abs=6e-4)


def test_an_interval_by_hand():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))
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
    [([1.0, 1.1, 0.9], "agrees"), ([-1.0, -1.1, -0.9], "differs"), ([1.0, -1.0, 0.1], "open"), ([1.0], "open")],
)
def test_a_verdict_needs_an_interval_that_excludes_zero(values, verdict):
    note = judge("claim", estimate(values), "a less b")
    assert note.verdict == verdict
    assert note.evidence.startswith(f"a less b: {sum(values) / len(values):+.2f}")


def test_what_was_not_measured_is_open():
    assert judge("claim", None, "a less b").verdict == "open"
