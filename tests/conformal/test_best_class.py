"""Sets that may not be empty: their best class counts in calibration, for every score, rule and kind.

Draw N of a population of rows, calibrate, and take the coverage over the whole population. Its law is known exactly,
with atoms and all. Let F be the distribution of the labels' counted scores: minus infinity where the label is the best
class, which is in the set whatever the threshold. The threshold is the j-th smallest of N draws, so the coverage is at
most c = F(v) exactly when j of the draws are at most v: P(coverage <= c) = P(Binomial(N, c) >= j), which is
P(Beta(j, N + 1 - j) <= c). It is tested at every value of F, below and above 1 - alpha.

All draws have fixed seeds, and each test of a hypothesis has level 1e-4: about one seed in thirty would make one of the
three hundred here reject a right implementation.
"""

import math

import numpy as np
import pytest
import torch

from tests.conformal.rows import counted_by_hand, marginals_for, model_rows, score_of, values_of
from topk_registry.conformal import (
    RULES,
    SCORES,
    PredictionSets,
    Thresholds,
    calibrate,
    coverage_law,
    create_score,
    probabilities,
    tune,
)
from topk_registry.conformal.coverage import beta_cdf
from topk_registry.conformal.sets import ScoredRows
from topk_registry.conformal.thresholds import order_of
from topk_registry.conformal.tuning import CHOICES, mean_size

POOL, CLASSES, N, SPLITS, LEVEL = 1200, 8, 104, 150, 1e-4
KINDS = [(False, False), (False, True), (True, False), (True, True)]
kinds = pytest.mark.parametrize(("allow_empty", "drawn"), KINDS, ids=["best", "best U", "empty", "empty U"])


class Population:
    """Rows, what a score needs of them, and the labels' scores that thresholds are compared with."""

    def __init__(self, name, allow_empty, drawn, sharpness=6.0):
        self.logits, self.labels = model_rows(POOL, CLASSES, seed=1, sharpness=sharpness)
        self.score, self.allow_empty = score_of(name, CLASSES), allow_empty
        self.marginals = marginals_for(self.score, self.logits)
        self.u = np.random.default_rng(3).random((POOL, 1)) if drawn else np.zeros((POOL, 1))
        values = values_of(self.score, self.logits)
        of_classes = self.score(values, self.u) if allow_empty else counted_by_hand(self.score, values, self.u)
        self.own = of_classes[np.arange(POOL), self.labels]

    def calibrate(self, rows, alpha, rule="marginal", **options):
        marginals = None if self.marginals is None else self.marginals[rows]
        return calibrate(self.logits[rows], self.labels[rows], alpha=alpha, score=self.score, rule=rule, u=self.u[rows],
                         marginals=marginals, allow_empty=self.allow_empty, rule_options=options)  # fmt: skip

    def sets(self, found):
        return found(self.logits, marginals=self.marginals, u=self.u)

    def covered(self, found):
        """Whether the label of each row is in its set [POOL]."""
        return self.sets(found)[np.arange(POOL), self.labels]


def assert_law(coverages, scores, count, alpha):
    """The coverages of a population's scores have the law of thresholds from ``count`` draws."""
    a, b = coverage_law(count, alpha)
    support = np.unique(np.searchsorted(np.sort(scores), scores, side="right")) / len(scores)
    assert np.isin(coverages, support).all()
    found = np.searchsorted(np.sort(coverages), support, side="right") / len(coverages)
    distance = np.abs(found - [beta_cdf(c, a, b) for c in support]).max()
    assert distance < math.sqrt(-math.log(LEVEL / 2) / 2 / len(coverages))


@kinds
@pytest.mark.parametrize("alpha", [0.1, 0.3])
@pytest.mark.parametrize("name", SCORES)
def test_coverage_follows_its_law(name, alpha, allow_empty, drawn):
    rows, rng, coverages = Population(name, allow_empty, drawn), np.random.default_rng(11), []
    population = np.sort(rows.own)
    for i in range(SPLITS):
        found = rows.calibrate(rng.integers(POOL, size=N), alpha)
        coverages.append(np.searchsorted(population, found.thresholds.scores, side="right") / POOL)
        if i < 3:  # the sets themselves, which cost more
            np.testing.assert_array_equal(rows.covered(found), rows.own <= found.thresholds.scores)
    assert_law(np.array(coverages), rows.own, N, alpha)


@kinds
@pytest.mark.parametrize("name", SCORES)
def test_each_class_follows_the_law_of_its_own_samples(name, allow_empty, drawn):
    rows, rng, m, alpha = Population(name, allow_empty, drawn), np.random.default_rng(5), 40, 0.2
    members = [np.flatnonzero(rows.labels == y) for y in range(CLASSES)]
    coverages = np.empty((80, CLASSES))
    for i in range(len(coverages)):
        found = rows.calibrate(np.concatenate([rng.choice(mine, m) for mine in members]), alpha, "per_class")
        inside = rows.own <= np.asarray(found.thresholds.scores)[rows.labels]
        coverages[i] = [inside[mine].mean() for mine in members]
        if not i:
            np.testing.assert_array_equal(rows.covered(found), inside)
    for y, mine in enumerate(members):
        assert_law(coverages[:, y], rows.own[mine], m, alpha)


def mean_with_atom(best, count, alpha):
    """E max(best, V), V of the law of coverage: the mean coverage where the best class alone covers ``best``."""
    a, b = coverage_law(count, alpha)
    v = np.linspace(best, 1, 400)
    tail = np.array([1 - beta_cdf(x, a, b) for x in v])
    return best + float(((tail[1:] + tail[:-1]) / 2 * np.diff(v)).sum())


@kinds
@pytest.mark.parametrize("rule", ["interpolated", "clustered", "rc3p"])
@pytest.mark.parametrize("name", SCORES)
def test_rules_without_a_law_cover_enough_and_not_much_more(name, rule, allow_empty, drawn):
    rows, rng, m, alpha, splits = Population(name, allow_empty, drawn), np.random.default_rng(7), 40, 0.2, 20
    members = [np.flatnonzero(rows.labels == y) for y in range(CLASSES)]
    options = {"clusters": 2} if rule == "clustered" else {}
    coverages = []
    for _ in range(splits):
        found = rows.calibrate(np.concatenate([rng.choice(mine, m) for mine in members]), alpha, rule, **options)
        covered = rows.covered(found)
        coverages.append(np.mean([covered[mine].mean() for mine in members]))
    mean, error = np.mean(coverages), 4 * np.std(coverages) / math.sqrt(splits)
    least = {"interpolated": 1 - 2 * alpha, "clustered": 1 - alpha - 0.02, "rc3p": 1 - alpha - 0.03}[rule]
    assert mean >= least - error
    if len(np.unique(rows.own)) <= CLASSES:  # ranks without U cover more
        return
    # misses of rank and of score of shares e and alpha - e, each in the other at best: at least alpha / 2 are missed
    most_missed = alpha / 2 if rule == "rc3p" else alpha
    best = [np.isneginf(rows.own[mine]).mean() for mine in members]
    most = np.mean([mean_with_atom(b, m, alpha) for b in best]) + alpha - most_missed
    assert mean <= most + error


@kinds
@pytest.mark.parametrize("name", SCORES)
def test_average_sizes_are_those_wanted(name, allow_empty, drawn):
    rows, everything = Population(name, allow_empty, drawn), np.arange(POOL)
    for size in (1.0, 1.5, 3.0):
        found = rows.calibrate(everything, 0.1, "average_size", size=size)
        got, scores = rows.sets(found).sum() / POOL, rows.score(values_of(rows.score, rows.logits), rows.u)
        tied = (scores == found.thresholds.scores).sum()  # ranks without U: whole columns
        assert size <= got + 1e-12
        assert got <= size + (tied - 1 if tied else 0) / POOL + 1e-12
    if not allow_empty:
        with pytest.raises(ValueError, match=r"mean size of sets that may not be empty is at least 1, got 0\.5"):
            rows.calibrate(everything, 0.1, "average_size", size=0.5)


def test_every_rule_is_tested_here():
    assert set(RULES) == {"marginal", "per_class", "per_node", "interpolated", "clustered", "rc3p", "average_size"}


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_torch_counts_as_numpy_does(name, allow_empty):
    rows = Population(name, allow_empty, True)
    torch_marginals = None if rows.marginals is None else torch.from_numpy(rows.marginals)
    theirs = calibrate(torch.from_numpy(rows.logits), torch.from_numpy(rows.labels), alpha=0.2, score=rows.score,
                       allow_empty=allow_empty, u=torch.from_numpy(rows.u), marginals=torch_marginals)  # fmt: skip
    ours = rows.calibrate(np.arange(POOL), 0.2)
    assert theirs.thresholds.scores == pytest.approx(ours.thresholds.scores, abs=1e-12)
    above = Thresholds(ours.thresholds.scores + 1e-9)  # the last digits of the scores do not matter
    for found in (ours, theirs):
        sets = PredictionSets(found.score, above, allow_empty=allow_empty)
        np.testing.assert_array_equal(rows.covered(sets), rows.own <= above.scores)
        inside = sets(torch.from_numpy(rows.logits), u=torch.from_numpy(rows.u), marginals=torch_marginals)
        np.testing.assert_array_equal(inside.numpy(), rows.sets(sets))


@pytest.mark.parametrize("name", SCORES)
def test_exactly_the_order_of_the_calibration_is_covered(name):
    for allow_empty in (False, True):
        rows = Population(name, allow_empty, True)
        for alpha in (0.05, 0.1, 0.2, 0.3):
            found = rows.calibrate(np.arange(POOL), alpha)
            least = max(order_of(POOL, alpha), int(np.isneginf(rows.own).sum()))
            assert rows.covered(found).sum() == least


@pytest.mark.parametrize("name", SCORES)
def test_where_the_best_class_covers_enough_it_stands_alone(name):
    """The rank of a label is 1 or more: at alpha = 0.5 most scores need no second class of these rows."""
    rows = Population(name, False, False)
    best = np.isneginf(rows.own).mean()
    assert best > 0.4
    found = rows.calibrate(np.arange(POOL), 1 - best + 0.01)
    assert found.thresholds.scores == -math.inf
    assert (rows.sets(found).sum(-1) == 1).all()
    assert rows.covered(found).mean() == best
    empty = Population(name, True, True)
    found = empty.calibrate(np.arange(POOL), 1 - best + 0.01)
    assert empty.covered(found).mean() < best


def test_hard_rows_no_longer_pay_for_easy_ones():
    """Rows of 100 classes, two thirds of them sure and right, the others flat: aps covered nearly all of them."""
    rng = np.random.default_rng(0)
    n, count = 100, 8000
    hard = rng.random(count) < 0.36
    logits = rng.standard_normal((count, n)) * np.where(hard, 0.6, 1.0)[:, None]
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    logits[np.arange(count), labels] += np.where(hard, 0, 14)
    half, found = count // 2, {}
    for name in ("lac", "aps"):
        inside = calibrate(logits[:half], labels[:half], alpha=0.1, score=name)(logits[half:])
        found[name] = inside[np.arange(half), labels[half:]].mean(), inside.sum(-1).mean()
    # coverage has a standard deviation of 0.0067 over calibrations and rows: four of it
    assert all(abs(coverage - 0.9) < 0.027 for coverage, _ in found.values())
    assert found["aps"][1] < 1.1 * found["lac"][1]


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize("kind", CHOICES)
def test_options_are_tuned_on_the_sets_that_will_be_made(kind, allow_empty):
    logits, labels = model_rows(900, 12, seed=2, sharpness=6.0)
    p, start = probabilities(logits), create_score(kind.name)
    sizes = {}
    for choice in CHOICES[kind](start, p, labels, 0.1):
        sets = calibrate(logits, labels, alpha=0.1, score=choice, allow_empty=allow_empty)
        sizes[choice] = float(sets(logits).sum(-1).mean())
        assert mean_size(ScoredRows(choice, p, labels, allow_empty), 0.1) == sizes[choice]
    assert tune(start, p, labels, 0.1, allow_empty=allow_empty) == min(sizes, key=sizes.__getitem__)


def test_nan_is_not_taken_for_a_best_class():
    logits, labels = model_rows(40, 4)
    logits[7] = np.nan
    labels[7] = 0
    for name in ("lac", "aps", "raps", "saps", "topk", "tree"):
        with pytest.raises(ValueError, match="1 of 40 calibration scores are NaN"):
            calibrate(logits, labels, alpha=0.2, score=name)


@pytest.mark.parametrize("temperature", [-1.0, 0.0, np.inf, np.nan])
def test_a_temperature_that_reverses_scores_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0 and finite, got"):
        calibrate(np.eye(40, 5), np.arange(40) % 5, temperature=temperature)
