"""The promise itself: mean coverage, the Beta law, class by class, and what the rules for rare classes keep of it.

All draws have fixed seeds. Each test of a hypothesis has level 0.001: about one seed in a hundred would make one of the
dozen here reject a right implementation.
"""

import math

import numpy as np
import pytest

from tests.conformal.rows import model_rows, score_of, values_of
from topk_registry.conformal import (
    SCORES,
    coverage_law,
    create_score,
    interpolated,
    marginal,
    per_class,
    probabilities,
)
from topk_registry.conformal.coverage import beta_cdf

N, ALPHA, SPLITS, CLASSES = 104, 0.1, 1000, 8  # 95 / 105 lies in the middle of 0.9 and 0.9 + 1 / 105
POOL = 20_000
KS_CRITICAL = math.sqrt(-math.log(0.001 / 2) / 2 / SPLITS)  # of the Kolmogorov-Smirnov statistic at level 0.001


@pytest.fixture(scope="module")
def rows():
    return model_rows(POOL, CLASSES)


def continuous_scores(name, rows):
    """The labels' scores under a method, with U drawn, so that no two are equal."""
    logits, labels = rows
    u = np.random.default_rng(3).random((len(labels), 1))
    score = score_of(name, CLASSES)
    scores = score.of_labels(values_of(score, logits), labels, u)
    assert len(np.unique(scores)) == len(scores)
    return scores


def coverages(scores, order=None):
    """The coverage of thresholds from SPLITS draws of N scores, in the population of all of them."""
    rng = np.random.default_rng(11)
    population = np.sort(scores)
    found = []
    for _ in range(SPLITS):
        drawn = rng.choice(scores, N)
        threshold = marginal(drawn, ALPHA) if order is None else np.sort(drawn)[order - 1]
        found.append(np.searchsorted(population, threshold, side="right") / POOL)
    return np.sort(found)


def distance_to_law(found):
    """The Kolmogorov-Smirnov statistic of the coverages against their Beta law."""
    a, b = coverage_law(N, ALPHA)
    expected = np.array([beta_cdf(x, a, b) for x in found])
    i = np.arange(len(found))
    return max((expected - i / SPLITS).max(), ((i + 1) / SPLITS - expected).max())


@pytest.mark.parametrize("name", SCORES)
def test_mean_coverage_is_what_is_promised(name, rows):
    found = coverages(continuous_scores(name, rows))
    assert 1 - ALPHA <= found.mean() <= 1 - ALPHA + 1 / (N + 1)
    assert distance_to_law(found) < KS_CRITICAL


def test_these_tests_see_a_threshold_one_order_too_low(rows):
    order = coverage_law(N, ALPHA)[0]
    scores = continuous_scores("lac", rows)
    assert coverages(scores, order - 1).mean() < 1 - ALPHA
    assert coverages(scores, order + 1).mean() > 1 - ALPHA + 1 / (N + 1)
    assert distance_to_law(coverages(scores, order - 1)) > KS_CRITICAL


def test_without_u_coverage_is_only_larger(rows):
    logits, labels = rows
    scores = create_score("topk").of_labels(probabilities(logits), labels)
    assert coverages(scores).mean() > 1 - ALPHA + 1 / (N + 1)


def test_each_class_is_covered_by_its_own_threshold(rows):
    logits, labels = rows
    scores = create_score("lac").of_labels(probabilities(logits), labels)
    rng = np.random.default_rng(5)
    misses = []
    for _ in range(200):
        drawn = rng.choice(POOL, 60 * CLASSES)
        limits = per_class(scores[drawn], labels[drawn], CLASSES, ALPHA)
        wrong = scores > limits[labels]
        misses.append([wrong[labels == y].mean() for y in range(CLASSES)])
    # each mean of 200 coverages with standard deviation 0.04: four of theirs are 0.011
    assert np.mean(misses, axis=0).max() < ALPHA + 0.011
    assert np.mean(misses, axis=0).min() > ALPHA - 1 / 50 - 0.011


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_interpolated_thresholds_miss_at_most_twice_alpha(share, rows):
    logits, labels = rows
    scores = create_score("lac").of_labels(probabilities(logits), labels)
    rng = np.random.default_rng(6)
    misses = []
    for _ in range(200):
        drawn = rng.choice(POOL, 200)
        limits = interpolated(scores[drawn], labels[drawn], CLASSES, ALPHA, share=share, largest=1.0)
        misses.append((scores > limits[labels]).mean())
    assert np.mean(misses) < 2 * ALPHA
