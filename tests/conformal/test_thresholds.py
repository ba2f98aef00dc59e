"""Thresholds against their definitions, and the documented answers where there is too little data."""

import math

import numpy as np
import pytest
import torch

from tests.conformal.rows import model_rows
from topk_registry.conformal import (
    PredictionSets,
    Thresholds,
    average_size,
    calibrate,
    clustered,
    create_score,
    interpolated,
    marginal,
    per_class,
    probabilities,
    rc3p,
)
from topk_registry.conformal.scores import ranks
from topk_registry.conformal.thresholds import fewest, order_of


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 9, 10, 99, 100, 999])
def test_the_order_is_exact_in_decimals(count, alpha):
    thousandths = round(1000 * alpha)
    exact = -(-(count + 1) * (1000 - thousandths) // 1000)
    assert order_of(count, alpha) == exact
    scores = np.random.default_rng(0).permutation(count).astype(float)  # the j-th smallest is j - 1
    assert marginal(scores, alpha) == (exact - 1 if exact <= count else math.inf)
    assert (exact <= count) == (count >= fewest(alpha))


def test_tensors_and_ties():
    scores = torch.tensor([1.0, 1.0, 1.0, 2.0])
    assert marginal(scores, 0.5) == 1.0
    assert marginal(scores, 0.2) == 2.0
    assert marginal(scores, 0.1) == math.inf


def test_each_class_has_its_own_threshold_and_a_rare_one_is_in_every_set():
    logits, labels = model_rows(2000, 5)
    labels[labels == 4] = 3
    sets = calibrate(logits, labels, alpha=0.1, rule="per_class")
    scores = 1 - probabilities(logits)[np.arange(2000), labels]
    limits = np.asarray(sets.thresholds.scores)
    for y in range(4):
        own = np.sort(scores[labels == y])
        assert limits[y] == own[math.ceil((len(own) + 1) * 0.9) - 1]
    assert limits[4] == math.inf
    assert sets(logits)[:, 4].all()
    few = per_class(np.arange(8.0), np.zeros(8, int), 1, 0.1)  # 9 samples are the fewest at 0.1
    assert few.tolist() == [math.inf]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_infinite_thresholds_are_weighed_as_their_nearest_score(share):
    labels = np.repeat(np.arange(3), 20)
    scores = np.concatenate((np.full(20, -math.inf), np.linspace(0.4, 0.6, 20), np.r_[0.3, np.full(19, math.inf)]))
    own = per_class(scores, labels, 4, 0.1)
    assert own.tolist() == [-math.inf, np.linspace(0.4, 0.6, 20)[18], math.inf, math.inf]
    assert marginal(scores, 0.1) == math.inf
    got = interpolated(scores, labels, 4, 0.1, share=share, largest=1.0)
    if share == 1:
        np.testing.assert_array_equal(got, np.minimum(own, 1.0))
    else:
        np.testing.assert_allclose(got, share * own.clip(0.3, 1.0) + (1 - share) * 1.0, rtol=1e-15)
    assert not np.isnan(got).any()
    nothing = interpolated(np.full(40, -math.inf), np.repeat([0, 1], 20), 3, 0.1, share=share, largest=1.0)
    assert nothing.tolist() == [-math.inf, -math.inf, 1.0 if share == 1 else -math.inf]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_interpolated_thresholds_lie_between(share):
    logits, labels = model_rows(500, 6)
    labels[labels == 0] = 1
    scores = 1 - probabilities(logits)[np.arange(500), labels]
    own, common = np.minimum(per_class(scores, labels, 6, 0.1), 1.0), marginal(scores, 0.1)
    got = interpolated(scores, labels, 6, 0.1, share=share, largest=1.0)
    np.testing.assert_allclose(got, share * own + (1 - share) * common, rtol=1e-15)
    assert np.isfinite(got).all()
    cut = interpolated(scores, labels, 6, 0.1, share=1.0)  # no bound is known: the largest score stands for it
    assert cut[0] == scores.max()


def test_average_size_has_that_size():
    logits, _ = model_rows(400, 9)
    for size in (0.5, 1.0, 2.37, 9):
        sets = calibrate(logits, np.zeros(400, int), rule="average_size", rule_options={"size": size}, allow_empty=True)
        assert sets(logits).sum() == round(400 * size)
    with pytest.raises(ValueError, match="at most the 9 classes, got 10"):
        average_size(np.zeros((3, 9)), 10)


def test_rc3p_limits_ranks_class_by_class():
    logits, labels = model_rows(3000, 6)
    labels[labels == 5] = 0
    score, p, alpha = create_score("aps"), probabilities(logits), 0.2
    places = ranks(p)[np.arange(3000), labels]
    found = rc3p(score.of_labels(p, labels), places, labels, 6, alpha)
    for y in range(5):
        mine = labels == y
        k = next(k for k in range(1, 7) if (places[mine] > k).mean() < alpha)
        left = alpha - (places[mine] > k).mean()
        assert found.max_rank[y] == k
        assert found.scores[y] == marginal(score.of_labels(p, labels)[mine], left)
    assert (found.scores[5], found.max_rank[5]) == (math.inf, 6)


def test_clusters_find_classes_of_like_scores():
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(12), 200)
    scale = np.where(np.arange(12) < 6, 0.2, 1.0)
    scores = scale[labels] * rng.random(len(labels))
    limits = clustered(scores, labels, 13, 0.1, clusters=2)
    assert len(set(limits[:6])) == len(set(limits[6:12])) == 1
    # a threshold of about 1000 scores, uniform up to the scale: four standard deviations are 0.038 of it
    np.testing.assert_allclose(limits[:12], 0.9 * scale, rtol=0.043)
    common = limits[12]  # no sample: the threshold of all classes
    assert limits[0] < common < limits[6]
    assert (clustered(scores, labels, 13, 0.1, clusters=2) == limits).all()
    assert len(set(clustered(scores, labels, 13, 0.1, clusters=1))) == 1


@pytest.mark.parametrize("infinite", [-math.inf, math.inf])
def test_clusters_of_classes_with_infinite_scores(infinite):
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(12), 200)
    scores = np.where(labels < 6, 0.2, 1.0) * rng.random(len(labels))
    scores[labels == 3] = infinite
    limits = clustered(scores, labels, 12, 0.1, clusters=3)
    assert not np.isnan(limits).any()
    assert len(set(limits[6:])) == 1  # no infinity has moved the others
    if infinite < 0:
        assert limits[3] == -math.inf
    else:  # the common threshold, as that of classes too rare to be placed
        assert limits[0] < limits[6] < limits[3] < 1
    assert (clustered(np.full(2400, infinite), labels, 12, 0.1, clusters=2) == infinite).all()


@pytest.mark.parametrize("count", [9, 51, 100, 137])
def test_orders_are_whole_numbers_of_samples_at_every_alpha(count):
    """In floating point 0.07 times 100 is a little more than 7, and the seventh sample of a hundred was given away."""
    places = np.repeat([1, 2, 3], (count - count // 2, count // 2 - count // 10, count // 10))
    scores = np.arange(count) / count
    for hundredths in range(1, 100):
        alpha = hundredths / 100
        found = rc3p(scores, places, np.zeros(count, int), 1, alpha)
        if count < -(-100 // hundredths) - 1:
            assert (found.scores[0], found.max_rank[0]) == (math.inf, 1)  # n is 1
            continue
        allowed = -(-hundredths * count // 100) - 1
        rank = int(np.sort(places)[count - 1 - allowed])
        left = hundredths * count - 100 * int((places > rank).sum())  # of alpha, in units of 1 / (100 count)
        assert 0 < left <= hundredths * count
        order = -(-(count + 1) * (100 * count - left) // (100 * count))
        assert found.max_rank[0] == rank
        assert found.scores[0] == (scores[order - 1] if order <= count else math.inf)


def test_an_infinite_threshold_leaves_the_rank_limit():
    """A hundred classes with 51 samples each: so many of their thresholds are infinite, and so few of their ranks."""
    n, m, alpha = 100, 51, 0.1
    rng = np.random.default_rng(0)

    def rows(count):
        labels = np.repeat(np.arange(n), count)
        logits = rng.standard_normal((len(labels), n))
        logits[np.arange(len(labels)), labels] += 2.0
        return logits, labels

    logits, labels = rows(m)
    sets = calibrate(logits, labels, alpha=alpha, score="aps", rule="rc3p")
    limits = sets.thresholds
    assert np.isinf(limits.scores).mean() > 0.3
    assert not limits.unlimited(n).any()
    logits, labels = rows(40)
    inside = sets(logits)
    np.testing.assert_array_equal(inside & (ranks(logits) > limits.max_rank), False)
    coverage, size = inside[np.arange(len(labels)), labels].mean(), inside.sum(-1).mean()
    # near 1 - alpha: the largest of 51 ranks that leaves 5 beyond has a mean coverage of 46 / 52 or more
    assert 46 / 52 - 0.02 < coverage < 0.95
    always = PredictionSets(sets.score, Thresholds(limits.scores))(logits)
    assert size < always.sum(-1).mean() / 1.5


def test_a_class_with_too_few_samples_has_no_limit_of_any_kind():
    labels = np.repeat([0, 1, 2], (40, 9, 8))
    found = rc3p(np.linspace(0, 1, 57), np.ones(57, int), labels, 4, 0.1)  # 9 samples are the fewest
    assert found.max_rank.tolist() == [1, 1, 4, 4]
    assert found.unlimited(4).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((math.nan,), "thresholds must be numbers, got NaN"),
        ((np.array([0.5, math.nan]),), "thresholds must be numbers, got NaN"),
        ((0.5, 0), "largest rank must be at least 1, got 0"),
        ((0.5, np.array([2, 0])), "largest rank must be at least 1, got 0"),
    ],
)
def test_thresholds_are_numbers_and_ranks_start_at_one(given, message):
    with pytest.raises(ValueError, match=message):
        Thresholds(*given)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("marginal", {"share": 0.5}, "rule marginal takes no options, got share"),
        ("clustered", {"size": 2}, "rule clustered takes clusters, seed, got size"),
        ("average_size", {}, "rule average_size takes size, got none"),
    ],
)
def test_options_of_rules_must_fit(rule, options, message):
    logits, labels = model_rows(50, 4)
    with pytest.raises(ValueError, match=message):
        calibrate(logits, labels, rule=rule, rule_options=options)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 90, math.nan])
def test_alpha_must_be_a_share(alpha):
    logits, labels = model_rows(20, 4)
    with pytest.raises(ValueError, match=r"above 0 and below 1, got .*; 0.1 asks for 90 % coverage"):
        calibrate(logits, labels, alpha=alpha)


def test_too_few_samples_say_how_many_it_takes():
    logits, labels = model_rows(50, 4)
    with pytest.raises(ValueError, match=r"50 calibration .* alpha = 0\.01: it takes 99, or alpha of at least 0\.0197"):
        calibrate(logits, labels, alpha=0.01)
    calibrate(logits, labels, alpha=0.0197)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 1, 4]), "label 4, but the model has the classes 0 to 3"),
        (np.array([0, -1, 2]), "label -1, but the model has the classes 0 to 3"),
        (np.array([0.0, 1.0, 2.0]), "labels must be class indices"),
        (np.array([0, 1]), "expected a label for each of 3 rows, got 2"),
    ],
)
def test_labels_must_fit(labels, message):
    with pytest.raises(ValueError, match=message):
        calibrate(np.zeros((3, 4)), labels, alpha=0.5)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="1 of 3 calibration scores are NaN"):
        marginal(np.array([0.0, math.nan, 1.0]), 0.5)
    with pytest.raises(ValueError, match="no rule is called 'mondrian'; there are marginal, per_class"):
        calibrate(np.zeros((3, 4)), np.zeros(3, int), alpha=0.5, rule="mondrian")
