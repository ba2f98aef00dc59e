"""Scores by their definition, sets with class lists, and the guarantee by repetition on both sides of its law."""

import functools
import math

import numpy as np
import pytest
from scipy.special import betainc

from topk_registry.conformal import (
    LEVELS,
    RULES,
    SCORES,
    PredictionSets,
    Score,
    calibrate,
    fewest,
    fit_temperature,
    guarantee,
    log_probabilities,
    order_of,
    probabilities,
    threshold,
    threshold_table,
)
from topk_registry.conformal.sets import label_scores

RAPS = Score("raps", penalty=0.05, k_reg=1)
BUILT = {"lac": Score("lac"), "aps": Score("aps"), "raps": RAPS}
KS_LEVEL = 0.001  # chance that one test of the law rejects a correct implementation


def model_rows(count, n=8, seed=0):
    """Logits [count, n] and labels drawn from a softmax that is less sharp than the model's."""
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.standard_normal((count, n)) * rng.uniform(0.3, 1.5, (count, 1))
    return logits, (0.7 * logits + rng.gumbel(size=logits.shape)).argmax(-1)


def by_hand(score, p):
    """The score of each class of one row of probabilities, from the definition."""
    order = sorted(range(len(p)), key=lambda y: (-p[y], y))
    out = np.zeros(len(p))
    for rank, y in enumerate(order, 1):
        if score.name == "lac":
            out[y] = -math.log(p[y]) if p[y] else math.inf
        else:
            out[y] = math.fsum(p[i] for i in order[:rank])
        if score.name == "raps":
            out[y] += score.penalty * max(0, rank - score.k_reg)
    return out


ROWS = {
    "generic": model_rows(20)[0],
    "ties": np.array([[1.0, 3.0, 3.0, 1.0, 0.0], [2.0, 2.0, 0.0, 2.0, 2.0]]),
    "flat": np.zeros((2, 5)),
    "dominant": np.array([[0.0, 60.0, 0.0, 1.0, -5.0]]),
    "minus infinity": np.array([[0.0, 1.0, -np.inf]]),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_their_definition(name, rows):
    log_p = log_probabilities(ROWS[rows])
    scores = BUILT[name](log_p)
    by_rows = [by_hand(BUILT[name], row) for row in probabilities(ROWS[rows])]
    np.testing.assert_allclose(scores, by_rows, rtol=1e-13, atol=1e-15)
    single = BUILT[name](log_p.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, scores, rtol=1e-5, atol=1e-6)


def test_ranks_beyond_the_largest_have_an_infinite_score():
    p = log_probabilities(np.zeros((1, 1200)))
    assert np.isinf(Score("aps")(p)).sum() == 200
    assert np.isfinite(Score("lac")(p)).all()


@pytest.mark.parametrize(("count", "alpha"), [(100, 0.07), (99, 0.1), (19, 0.05), (9, 0.1), (7, 0.3), (1000, 0.005)])
def test_orders_are_exact_in_decimals(count, alpha):
    thousandths = round(alpha * 1000)
    order = -(-(count + 1) * (1000 - thousandths) // 1000)
    assert order_of(count, alpha) == order
    scores = np.random.default_rng(0).permutation(count).astype(float)
    assert threshold(scores, alpha) == (order - 1 if order <= count else math.inf)
    assert threshold(np.zeros(fewest(alpha)), alpha) == 0
    assert threshold(np.zeros(fewest(alpha) - 1), alpha) == math.inf


def test_a_table_has_the_threshold_of_each_level_and_class():
    rng = np.random.default_rng(1)
    scores, labels = rng.random(300), rng.integers(0, 4, 300)
    labels[labels == 3] = 2  # class 3 has no sample
    table = threshold_table(scores, labels, 4, rule="per-class")
    assert table.shape == (len(LEVELS), 4)
    for g in (0, 19, 99):
        assert [threshold(scores[labels == y], LEVELS[g]) for y in range(4)] == list(table[g])
    assert np.isinf(table[:, 3]).all()
    assert threshold_table(scores, labels, 4)[19] == threshold(scores, 0.1)
    assert (table[1:] <= table[:-1]).all()  # a larger alpha never gives a larger set


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("rule", RULES)
def test_sets_by_hand(name, rule):
    logits, labels = model_rows(400)
    sets = calibrate(logits[:300], labels[:300], alpha=0.13, score=BUILT[name], rule=rule)
    assert sets.rule == rule
    new = logits[300:]
    for alpha in (0.13, 0.2, 0.213):
        level = max(g for g in sets.levels if g <= alpha)  # the next smaller level serves
        limits = sets.table[sets.levels.index(level)]
        scores = np.array([by_hand(BUILT[name], p) for p in probabilities(new)])
        expected = (scores <= limits) | (np.arange(8) == new.argmax(-1)[:, None])
        assert (sets(new, alpha=alpha) == expected).mean() > 0.999
    assert (sets(new) == sets(new, alpha=0.13)).all()
    assert sets(new).any(-1).all()
    allowed = np.arange(8) < 3
    inside = sets(new, allowed=allowed)
    expected = sets(new) & allowed
    expected[np.arange(len(new)), np.where(allowed, new, -np.inf).argmax(-1)] = True
    assert (inside == expected).all()
    broken = new.copy()
    broken[0, 2], broken[1] = np.nan, -np.inf
    inside = sets(broken)
    assert inside[:2].all()
    assert (inside[2:] == sets(new)[2:]).all()


@functools.cache
def scored_rows(name):
    logits, labels = model_rows(60_000, 20, seed=3)
    return label_scores(BUILT[name], log_probabilities(logits))[np.arange(len(labels)), labels], labels


def coverages(name, rule, alpha, count, splits):
    """The coverage of sets from ``splits`` calibrations: of class 3 with ``count`` samples, or of all classes."""
    scores, labels = scored_rows(name)
    groups = (scores[labels == 3], scores[labels != 3][:30]) if rule == "per-class" else (scores, scores[:0])
    given = np.repeat((3, 4), (count, len(groups[1])))
    rng, ordered, found = np.random.default_rng(11), np.sort(groups[0]), []
    for _ in range(splits):
        drawn = np.append(rng.choice(groups[0], count), groups[1])
        limit = threshold_table(drawn, given, 20, rule=rule, levels=(alpha,))[0, 3 * (rule == "per-class")]
        found.append(np.searchsorted(ordered, limit, side="right") / len(ordered))
    return np.sort(found)


PAIRS = [(name, rule) for name in SCORES for rule in RULES]


@pytest.mark.parametrize(
    ("name", "rule", "alpha"),
    [(*pair, alpha) for pair, alpha in zip(PAIRS, (0.1, 0.05, 0.2, 0.4, 0.05, 0.3), strict=True)],
)
def test_coverage_follows_its_law_on_both_sides(name, rule, alpha):
    count, splits = 104, 300
    found = coverages(name, rule, alpha, count, splits)
    a = order_of(count, alpha)
    b = count + 1 - a
    critical = math.sqrt(-math.log(KS_LEVEL / 2) / 2 / splits)
    assert distance_to_law(found, a, b) < critical
    for wrong in (-4, 4):  # the test has the power to see other thresholds
        if a + wrong <= count:
            assert distance_to_law(found, a + wrong, b - wrong) > critical


def distance_to_law(found, a, b):
    """The Kolmogorov-Smirnov statistic of coverages against Beta(a, b)."""
    expected = betainc(a, b, found)
    i = np.arange(len(found)) / len(found)
    return max((expected - i).max(), (i + 1 / len(found) - expected).max())


@pytest.mark.parametrize("name", SCORES)
def test_each_class_has_the_promised_coverage_on_both_sides(name):
    """The mean coverage of class c over calibrations is from 1 - alpha to 1 - alpha + 1 / (n_c + 1)."""
    alpha, repetitions, fresh, counts = 0.1, 400, 50, np.array([19, 20, 28])  # the means are 0.9, 0.905 and 0.931
    rng, coverage = np.random.default_rng(5), np.zeros(3)

    def rows(counts):
        labels = np.repeat(np.arange(3), counts)
        return rng.standard_normal((len(labels), 10)) + (np.diag([0.8, 1.2, 1.6]) @ np.eye(3, 10))[labels], labels

    for _ in range(repetitions):
        sets = calibrate(*rows(counts), alpha=alpha, score=BUILT[name], rule="per-class", levels=())
        logits, labels = rows(3 * [fresh])
        coverage += sets(logits)[np.arange(3 * fresh), labels].reshape(3, fresh).mean(1) / repetitions
    # one repetition has at most the variance of its Beta law and that of a share of ``fresh`` rows
    error = 4 * np.sqrt(alpha * (1 - alpha) * (1 / (counts + 2) + 1 / fresh) / repetitions)
    assert (coverage >= 1 - alpha - error).all()
    assert (coverage <= 1 - alpha + 1 / (counts + 1) + error).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: calibrate(x[:8], y[:8]), "too few"),
        (lambda x, y: calibrate(x, y[:5]), "one label"),
        (lambda x, y: calibrate(x, y + 8), "label"),
        (lambda x, y: calibrate(x, y, alpha=1.0), "alpha"),
        (lambda x, y: calibrate(x, y, score="softmax"), "lac, aps, raps"),
        (lambda x, y: calibrate(x, y, rule="clustered"), "marginal, per-class"),
        (lambda x, y: calibrate(x, y, temperature=0.0), "temperature"),
        (lambda x, y: calibrate(x * np.nan, y), "NaN"),
        (lambda x, y: calibrate(x, y)(x, alpha=0.001), "from 0.005 to 0.5"),
        (lambda x, y: calibrate(x, y)(x, alpha=0.51), "from 0.005 to 0.5"),
        (lambda x, y: Score("raps", penalty=-1), "penalty"),
        (lambda x, y: Score("raps", k_reg=1.5), "k_reg"),
        (lambda x, y: PredictionSets(Score(), (0.2, 0.1), np.zeros((2, 1))), "ascending"),
    ],
)
def test_wrong_input_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(*model_rows(100))


def test_guarantees_name_their_rule():
    assert "within each class" in guarantee("per-class", 0.1)
    assert "0.9" in guarantee("marginal", 0.1)
    assert "averaged" in guarantee("marginal", 0.1)


def test_samples_with_an_excluded_label_do_not_change_the_temperature():
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((500, 10))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    excluded = logits.copy()
    excluded[0, labels[0]] = -np.inf
    assert fit_temperature(excluded, labels) == fit_temperature(logits[1:], labels[1:])
    for value, rows in ((np.nan, 500), (np.inf, 500), (-np.inf, 1)):
        broken = logits[:rows].copy()
        broken[0, labels[0]] = value
        with pytest.raises(ValueError, match="logit"):
            fit_temperature(broken, labels[:rows])
