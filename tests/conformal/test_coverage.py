"""Exact intervals against 30-digit arithmetic, and the summary of coverage."""

import mpmath
import numpy as np
import pytest

from topk_registry.conformal import SetCounts, beta_quantile, binomial_interval


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 40), (95, 10), (9001, 1000)])
@pytest.mark.parametrize("p", [0.005, 0.5, 0.975])
def test_beta_quantiles(a, b, p):
    x = beta_quantile(p, a, b)
    with mpmath.workdps(30):
        assert float(mpmath.betainc(a, b, 0, x, regularized=True)) == pytest.approx(p, rel=1e-8)


def test_ends_of_intervals():
    assert binomial_interval(0, 10) == (0.0, pytest.approx(1 - 0.025**0.1, rel=1e-12))
    assert binomial_interval(10, 10)[1] == 1
    with pytest.raises(ValueError, match="got 3 of 2"):
        binomial_interval(3, 2)
    with pytest.raises(ValueError, match="level must be"):
        binomial_interval(1, 2, level=95)


def test_summary_counts_by_hand_and_adds_up_over_batches():
    sets = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]], bool)
    labels = np.array([0, 0, 1, 0])
    counts = SetCounts.of(sets, labels)
    values = counts.summary()
    assert values["coverage"] == 0.5
    assert values["mean_size"] == 7 / 4
    assert values["median_size"] == 2
    assert values["empty"] == 0.25
    assert values["singletons"] == 0
    assert values["macro_coverage"] == pytest.approx((2 / 3 + 0) / 2)
    assert values["worst_class_coverage"] == 0
    assert counts.interval == binomial_interval(2, 4)
    parts = SetCounts.of(sets[:1], labels[:1]) + SetCounts.of(sets[1:], labels[1:])
    assert parts.summary() == values
    assert SetCounts.of(sets[:0], labels[:0]).summary() == {}


@pytest.mark.parametrize("sizes", [[2, 4], [1], [1, 2, 3], [0, 3], [1, 1, 4, 4], [0, 0, 0, 4]])
def test_the_median_size_is_the_mean_of_the_two_middle_sizes(sizes):
    sets = np.arange(4)[None] < np.array(sizes)[:, None]
    assert SetCounts.of(sets, np.zeros(len(sizes), int)).summary()["median_size"] == np.median(sizes)


@pytest.mark.parametrize(
    ("sets", "labels", "message"),
    [([[1.0]], [0], "bool"), ([[True]], [1], "label 1"), ([[True]], [0, 0], "one label"), ([[True]], [0.0], "integer")],
)
def test_wrong_input_is_an_error(sets, labels, message):
    with pytest.raises(ValueError, match=message):
        SetCounts.of(np.array(sets), np.array(labels))
