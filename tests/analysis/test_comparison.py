"""Comparison of classifiers: its promises by repetition, its numbers beside other packages'."""

import json
import math
import re
from itertools import product

import numpy as np
import pytest

from topk_registry.analysis import compare, comparison_page, holm, label_log_likelihoods, mcnemar, topk_credits
from topk_registry.analysis.paired import (
    Interval,
    difference_p,
    equivalence_p,
    images_needed,
    interval,
    macro_mean_of,
    mean_of,
    resamples,
)
from topk_registry.conformal import binomial_interval, calibrate


def scores(rng, count, n=6, first=1.0, second=1.3):
    """Correlated scores of two models, and labels."""
    labels = rng.integers(0, n, count)
    right, common = np.eye(n)[labels], 0.8 * rng.normal(size=(count, n))
    a, b = (gain * right + common + 0.6 * rng.normal(size=(count, n)) for gain in (first, second))
    return a, b, labels


def by_measure(found, m=0):
    return {d.measure: d for d in found.others[m].differences}


def test_mcnemar_is_the_two_sided_binomial_test():
    scipy = pytest.importorskip("scipy.stats")
    for gained, lost in [*product(range(7), range(7)), (0, 40), (350, 401), (500, 540)]:
        expected = scipy.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)
        mid = expected - scipy.binom.pmf(gained, gained + lost, 0.5)
        if gained != lost:
            assert mcnemar(gained, lost, mid=True) == pytest.approx(mid, rel=1e-7)
    assert mcnemar(4, 4, mid=True) <= 1.0
    with pytest.raises(ValueError, match="at least 0"):
        mcnemar(-1, 2)


def test_the_exact_test_keeps_its_size_and_the_mid_p_value_stays_near_it():
    for total in (5, 20, 101):
        weights = np.array([math.comb(total, i) for i in range(total + 1)]) / 2.0**total
        exact = np.array([mcnemar(i, total - i) for i in range(total + 1)])
        mid = np.array([mcnemar(i, total - i, mid=True) for i in range(total + 1)])
        for alpha in (0.01, 0.05, 0.2):
            assert weights[exact <= alpha].sum() <= alpha
            assert weights[mid <= alpha].sum() <= 1.5 * alpha
            assert weights[mid <= alpha].sum() >= weights[exact <= alpha].sum()


def test_holm_is_that_of_statsmodels_and_groups_count_once():
    assert holm([0.01, 0.02, 0.03, 0.005]) == pytest.approx([0.03, 0.04, 0.04, 0.02])
    # the nulls of a group are never true together: two groups of two are two tests, not four
    assert holm([0.01, 0.5, 0.02, 0.6], ["a", "a", "b", "b"]) == pytest.approx([0.02, 1.0, 0.04, 1.0])
    # a group that is rejected whole counts no more
    assert holm([0.01, 0.011, 0.04, 0.6], ["a", "a", "b", "b"]) == pytest.approx([0.02, 0.022, 0.04, 0.6])
    assert holm([]) == []
    with pytest.raises(ValueError, match="a group for each"):
        holm([0.1], [])
    for wrong in (math.nan, 1.5, -0.1):
        with pytest.raises(ValueError, match=f"p-values must be from 0 to 1, got {wrong}"):
            holm([0.1, wrong])


def test_resamples_draw_every_image_as_often():
    blocks = list(resamples(1000, 5000, 3))
    drawn = np.concatenate(blocks)
    assert len(blocks) > 1
    assert drawn.shape == (5000, 1000)
    assert (drawn.sum(1) == 1000).all()
    assert abs(drawn.mean(0) - 1).max() < 6 / math.sqrt(5000)
    assert drawn.var() == pytest.approx(1 - 1 / 1000, abs=0.01)
    assert np.array_equal(drawn, np.concatenate(list(resamples(1000, 5000, 3))))


def test_statistics_of_draws_are_those_of_the_drawn_images():
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, 5, 60))
    values = rng.normal(size=60)
    drawn = rng.multinomial(60, np.full(60, 1 / 60), size=20).astype(float)
    drawn[:, labels == 2] = 0  # a class that no draw has
    for row, mean, macro in zip(drawn, mean_of(values)(drawn), macro_mean_of(values, labels)(drawn), strict=True):
        picked = np.repeat(np.arange(60), row.astype(int))
        own = [values[picked][labels[picked] == c].mean() for c in np.unique(labels[picked])]
        assert macro == pytest.approx(np.mean(own))
        assert mean == pytest.approx(values[picked].sum() / 60)


def test_measures_are_those_of_scikit_learn_with_ties_and_absent_classes():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    a, b, labels = scores(rng, 300, n=7)
    labels[labels == 3] = 0  # an absent class
    found = by_measure(compare([a, b], labels, k=(1, 3), resamples=100))
    for k, (name, own) in product((1, 3), (("first", a), ("second", b))):
        expected = metrics.top_k_accuracy_score(labels, own, k=k, labels=range(7))
        assert getattr(found[f"top-{k}"], name) == pytest.approx(100 * expected)
    with pytest.warns(UserWarning, match="classes not in y_true"):
        expected = 100 * metrics.balanced_accuracy_score(labels, b.argmax(1))
    assert found["macro top-1"].second == pytest.approx(expected)
    p = np.exp(a) / np.exp(a).sum(1, keepdims=True)
    expected = -metrics.log_loss(labels, p, labels=range(7))
    assert found["log-likelihood"].first == pytest.approx(expected)


def test_credits_are_those_of_the_metric_with_ties():
    import torch

    from topk_registry.metrics import TopKAccuracy

    rng = np.random.default_rng(2)
    values, labels = rng.integers(0, 4, (50, 6)).astype(np.float32), rng.integers(0, 6, 50)
    metric = TopKAccuracy((1, 2, 5), num_classes=6)
    metric.update(torch.from_numpy(values), torch.from_numpy(labels))
    expected = metric.compute()
    for k in (1, 2, 5):
        assert topk_credits(values, labels, k).mean() == pytest.approx(expected[f"top{k}"])


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.97])
def test_set_sizes_are_those_of_split_conformal_prediction(coverage):
    a, b, labels = scores(np.random.default_rng(3), 400)
    found = by_measure(compare([a, b], labels, coverage=coverage, resamples=100))[f"set size at {coverage:.0%}"]
    for name, own in (("first", a), ("second", b)):
        sets = calibrate(own, labels, alpha=round(1 - coverage, 4), score="lac", allow_empty=True)(own)
        assert getattr(found, name) == pytest.approx(sets.sum(1).mean())


@pytest.mark.slow
def test_set_sizes_are_those_of_mapie():
    pytest.importorskip("mapie")
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Given(ClassifierMixin, BaseEstimator):
        """A classifier whose probabilities are its inputs."""

        classes_ = np.arange(6)

        def fit(self, x, y):
            return self

        def predict_proba(self, x):
            return x

        def predict(self, x):
            return x.argmax(1)

        def __sklearn_is_fitted__(self):
            return True

    a, b, labels = scores(np.random.default_rng(4), 400)
    p = np.exp(b) / np.exp(b).sum(1, keepdims=True)
    mapie = SplitConformalClassifier(Given(), confidence_level=0.9, conformity_score="lac", prefit=True)
    mapie.conformalize(p, labels)
    _, sets = mapie.predict_set(p)
    found = by_measure(compare([a, b], labels, resamples=100))["set size at 90%"]
    assert found.second == pytest.approx(sets[..., 0].sum(1).mean())


def test_resampled_set_sizes_are_those_of_sets_calibrated_on_the_drawn_images():
    from topk_registry.analysis.set_sizes import set_size_of

    a, _, labels = scores(np.random.default_rng(5), 300)
    order = np.random.default_rng(6).permutation(300)
    mean, statistic = set_size_of(a, label_log_likelihoods(a, labels), 0.9, order)
    assert statistic(np.ones((1, 300)))[0] == pytest.approx(mean)
    for drawn in resamples(300, 20, 7):
        for row, value in zip(drawn, statistic(drawn), strict=True):
            picked = order[np.repeat(np.arange(300), row.astype(int))]
            sets = calibrate(a[picked], labels[picked], alpha=0.1, score="lac", allow_empty=True)(a[picked])
            assert value == pytest.approx(sets.sum(1).mean(), abs=0.02)  # sizes lie on a line between thresholds


REPEATED = 300


@pytest.mark.slow
def test_intervals_hold_the_true_difference_as_often_as_they_say():
    rng = np.random.default_rng(10)
    a, b, labels = scores(rng, 40_000)
    truth = {name: d.difference for name, d in by_measure(compare([a, b], labels, k=(1, 2), resamples=100)).items()}
    held = dict.fromkeys(truth, 0)
    for r in range(REPEATED):
        a, b, labels = scores(rng, 400)
        found = by_measure(compare([a, b], labels, k=(1, 2), resamples=600, seed=r))
        for name, true in truth.items():
            held[name] += found[name].low <= true <= found[name].high
    assert len(held) == 6
    for name, count in held.items():
        low, high = binomial_interval(count, REPEATED, level=0.999)
        assert low <= 0.95 <= high, (name, count / REPEATED)


@pytest.mark.slow
def test_models_that_are_equally_good_are_rarely_called_better_or_worse():
    rng, wrong = np.random.default_rng(11), 0
    for r in range(REPEATED):
        a, b, labels = scores(rng, 300, second=1.0)
        found = by_measure(compare([a, b], labels, k=(1, 2), margin=0.01, resamples=600, seed=r))
        wrong += any(d.verdict in ("better", "worse") for d in found.values())
    low, _ = binomial_interval(wrong, REPEATED, level=0.999)
    assert low <= 0.05, wrong / REPEATED


@pytest.mark.slow
def test_models_a_margin_apart_are_rarely_called_equivalent():
    """Accuracies differ by 2 points exactly, at a margin of 2 points, on enough images to show equivalence."""
    rng, margin, wrong, power = np.random.default_rng(12), 2.0, 0, 0
    for r in range(200):
        for apart in (margin, 0.0):
            changed = rng.choice([0.0, 100.0, -100.0], 1200, p=[0.96 - apart / 100, 0.02 + apart / 100, 0.02])
            values = np.concatenate([mean_of(changed)(block) for block in resamples(1200, 300, r)])
            found = equivalence_p(values, margin) <= 0.05
            wrong, power = wrong + (found and apart > 0), power + (found and apart == 0)
    low, high = binomial_interval(wrong, 200, level=0.999)
    assert low <= 0.05 <= high, wrong / 200
    assert power > 0.85 * 200


def test_the_number_of_images_that_would_decide_does():
    """With that many images four of five comparisons are decided."""
    rng, chances = np.random.default_rng(13), [0.94, 0.035, 0.025]
    value, deviation = 1.0, 100 * math.sqrt(0.06 - 0.01**2)
    needed = images_needed(500, Interval(value, 0.0, 0.0, deviation / math.sqrt(500)), 0.5, 0.05)
    assert needed is not None
    decided = 0
    for _ in range(400):
        changed = rng.choice([0.0, 100.0, -100.0], needed, p=chances)
        decided += abs(changed.mean()) > 1.959964 * changed.std() / math.sqrt(needed)
    low, high = binomial_interval(decided, 400, level=0.999)
    assert low <= 0.8 <= high
    assert images_needed(500, Interval(0.0, 0.0, 0.0, 0.0), 0.5, 0.05) is None
    assert images_needed(500, Interval(0.5, 0.0, 0.0, 1.0), 0.5, 0.05) is not None


def test_p_values_of_the_bootstrap_count_resamples():
    drawn = np.array([-1.0] + [1.0] * 98)
    assert difference_p(drawn) == pytest.approx(2 * 2 / 100)
    assert difference_p(np.zeros(99)) == 1.0
    assert equivalence_p(drawn, 2.0) == pytest.approx(1 / 100)
    assert equivalence_p(drawn, 1.0) == pytest.approx(99 / 100)
    found = interval(3.0, np.arange(1001.0), 0.9)
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 50.0, 950.0))


def test_verdicts_of_clear_cases():
    rng = np.random.default_rng(20)
    a, _, labels = scores(rng, 2000)
    good = 3 * np.eye(6)[labels] + a
    found = compare([a, good, a + 0.0, -a], labels, k=(1, 2, 6), names=["a", "good", "copy", "bad"])
    verdicts = [{d.verdict for d in other.differences} for other in found.others]
    assert verdicts == [{"better"}, {"equivalent"}, {"worse"}]
    assert found.settings["k"] == [1, 2], "a set of all classes is always right"
    top1 = by_measure(found)["top-1"]
    assert top1.gained - top1.lost == round(20 * top1.difference)
    assert top1.p == mcnemar(top1.gained, top1.lost)


def test_two_images_decide_nothing():
    labels = np.array([0, 1])
    found = compare([np.eye(2), np.eye(2)[::-1]], labels, k=(1,))
    assert by_measure(found)["top-1"].verdict in ("not decided", "worse")
    assert by_measure(found)["top-1"].p == 0.5


def test_images_that_changed_are_counted_by_class_and_the_largest_changes_come_first():
    labels = np.array([0, 0, 1, 1, 2])
    first = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]], float)
    second = np.array([[5, 0, 0], [5, 1, 0], [1, 0, 0], [9, 0, 0], [0, 0, 1]], float)
    found = compare([first, second], labels, k=(1,), class_names=["x", "y", "z"], resamples=100)
    (other,) = found.others
    assert other.changes.gained.tolist() == [1]
    assert other.changes.lost.tolist() == [3, 2]
    assert other.changes.by_class == [
        {"class": "y", "images": 2, "gained": 0, "lost": 2},
        {"class": "x", "images": 2, "gained": 1, "lost": 0},
    ]


def test_a_fitted_temperature_makes_the_scale_of_scores_no_matter():
    a, _, labels = scores(np.random.default_rng(21), 800)
    found = by_measure(compare([a, 7 * a], labels, fit_temperature=True, resamples=200))
    assert {d.verdict for d in found.values()} == {"equivalent"}
    assert by_measure(compare([a, 7 * a], labels, resamples=200))["log-likelihood"].verdict == "worse"


def test_findings_are_plain_types_and_a_page():
    a, b, labels = scores(np.random.default_rng(22), 200)
    found = compare([a, b], labels, names=["<a>", "b"], resamples=200)
    content = json.loads(json.dumps(found.to_dict()))
    assert content["comparisons"][0]["measures"][0]["measure"] == "top-1"
    assert len(content["comparisons"][0]["gained"]) == content["comparisons"][0]["measures"][0]["gained"]
    page = comparison_page(found, lambda i: "data:image/jpeg;base64,AAAA", lambda i: f"file {i}.png")
    assert "&lt;a&gt;" in page
    assert "<a>" not in page
    assert "data:image/jpeg" in page
    assert re.search(r"file \d+\.png", page)


def test_tensors_are_taken_too():
    import torch

    a, b, labels = scores(np.random.default_rng(23), 100)
    tensors = compare([torch.from_numpy(a), torch.from_numpy(b)], torch.from_numpy(labels), resamples=100)
    assert tensors.to_dict() == compare([a, b], labels, resamples=100).to_dict()


@pytest.mark.parametrize(
    ("logits", "labels", "options", "told"),
    [
        ([np.eye(3)], np.arange(3), {}, "at least two models"),
        ([np.eye(3), np.eye(3)[:, :2]], np.arange(3) % 2, {}, "same images and classes"),
        ([np.eye(3)] * 2, np.arange(4), {}, "expected scores"),
        ([np.eye(3)] * 2, np.arange(3) + 1, {}, "from 0 to 2, got 1 to 3"),
        ([np.eye(3)] * 2, np.arange(3.0), {}, "whole numbers"),
        ([np.full((3, 3), np.nan)] * 2, np.arange(3), {}, "finite"),
        ([np.eye(3)] * 2, np.arange(3), {"margin": 0.0}, "margin > 0"),
        ([np.eye(3)] * 2, np.arange(3), {"names": ["a"]}, "2 names of models"),
        ([np.zeros((0, 3))] * 2, np.zeros(0, int), {}, "N above 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(logits, labels, options, told):
    with pytest.raises(ValueError, match=told):
        compare(logits, labels, **options)
