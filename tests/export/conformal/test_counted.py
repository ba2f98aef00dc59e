"""Calibration on the graph's scores: every score, rule and kind, and the same numbers as numpy and torch.

A file's sets cover exactly as many of the calibration's own labels as the rule's order says, no more: this holds to the
last sample, and the law of coverage follows from it (tests/conformal/test_best_class.py).
"""

import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.conformal.rows import families, model_rows, score_of
from topk_export.calibration.graph import add_sets, largest_size, set_model
from topk_export.calibration.heads import HeadRows, Heads
from topk_export.verification.graph import LOGITS
from topk_registry.conformal import RULES, SCORES, PredictionSets, Thresholds, inputs_of
from topk_registry.conformal.rules import find_thresholds
from topk_registry.conformal.sets import ScoredRows
from topk_registry.conformal.thresholds import order_of

N, K, COUNT = 24, 5, 400
RULE_OPTIONS = {
    "average_size": {"size": 2.0},
    "clustered": {"clusters": 2},
    "per_node": {"parents": families(N)},
}
both = pytest.mark.parametrize("allow_empty", [False, True])


@pytest.fixture(scope="module")
def model(export):
    return onnx.load(str(export(N, k=K)))


@pytest.fixture(scope="module")
def rows():
    logits, labels = model_rows(COUNT, N, seed=4, sharpness=4.0)
    return logits.astype(np.float32), labels


def run(model, logits, names):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(names, {LOGITS: logits})


def head_rows(model, rows, name, allow_empty, *, by_rank=False):
    logits, labels = rows
    score = score_of(name, N, K)
    limit = N if score.ranked or by_rank else None
    return HeadRows(Heads(model, logits, "cpu"), score, 1.0, limit, np.arange(COUNT), labels, allow_empty)


@both
@pytest.mark.parametrize("name", SCORES)
def test_numpy_torch_and_graph_count_the_same_scores(model, rows, name, allow_empty):
    logits, labels = rows
    ours = head_rows(model, rows, name, allow_empty)
    (marginals,) = run(set_model(model), logits, ["marginals"])
    doubles = logits.astype(np.float64)
    for values, tolerance in (
        (inputs_of(ours.score, doubles, marginals=marginals), 1e-5),  # the graph's own single precision
        (inputs_of(ours.score, torch.from_numpy(doubles)), 1e-4),  # log-odds of marginals near 1 lose digits there
    ):
        own, theirs = ours.label_scores(), ScoredRows(ours.score, values, labels, allow_empty).label_scores()
        np.testing.assert_array_equal(np.isneginf(own), np.isneginf(theirs))
        assert np.isneginf(own).any() == (not allow_empty)
        some = np.isfinite(own) & (own > -9 if name == "log_odds" else True)
        assert some.sum() > COUNT / 10
        np.testing.assert_allclose(own[some], theirs[some], rtol=tolerance, atol=tolerance)


@both
@pytest.mark.parametrize("alpha", [0.1, 0.3])
@pytest.mark.parametrize("name", SCORES)
def test_the_file_covers_its_calibration_to_the_last_sample(model, rows, name, alpha, allow_empty):
    logits, labels = rows
    samples = head_rows(model, rows, name, allow_empty)
    limits, own = find_thresholds(samples, alpha, "marginal"), samples.label_scores()
    built = set_model(add_sets(model, PredictionSets(samples.score, limits, 1.0, allow_empty), N, max_size=N))
    inside, sizes = run(built, logits, ["set", "set_size"])
    hits = inside[np.arange(COUNT), labels]
    np.testing.assert_array_equal(hits, own <= limits.scores)
    order = order_of(COUNT, alpha)
    assert (own < limits.scores).sum() < order <= hits.sum()
    if (own == limits.scores).sum() == 1:
        assert hits.sum() == order
    np.testing.assert_array_equal(sizes, inside.sum(-1))
    assert (sizes.min() == 0) <= allow_empty


@both
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SCORES)
def test_every_rule_is_in_the_graph_as_it_was_calibrated(model, rows, name, rule, allow_empty):
    logits, labels = rows
    samples = head_rows(model, rows, name, allow_empty, by_rank=RULES[rule].limits_ranks)
    limits, own = find_thresholds(samples, 0.3, rule, **RULE_OPTIONS.get(rule, {})), samples.label_scores()
    sets = PredictionSets(samples.score, limits, 1.0, allow_empty)
    built = set_model(add_sets(model, sets, N, max_size=N))
    inside, sizes, marginals = run(built, logits, ["set", "set_size", "marginals"])
    allowed = own <= np.broadcast_to(limits.scores, N)[labels]
    if limits.max_rank is not None:
        allowed &= samples.label_ranks() <= limits.max_rank[labels]
    np.testing.assert_array_equal(inside[np.arange(COUNT), labels], allowed)
    np.testing.assert_array_equal(sizes, inside.sum(-1))
    # numpy in double precision, but for classes at the threshold, whose last digits decide
    expected = sets(logits.astype(np.float64), marginals=marginals)
    assert (inside != expected).sum() <= N + (rule == "average_size") * (name == "topk") * COUNT
    if rule == "average_size" and name != "topk":
        # the classes of a node have one score
        assert 2 * COUNT <= inside.sum() < 2 * COUNT + (N if name == "tree" else 1)


@pytest.mark.parametrize("name", SCORES)
def test_a_best_class_that_is_enough_stands_alone_in_the_graph(model, rows, name):
    logits, labels = rows
    samples = head_rows(model, rows, name, False)
    best = np.isneginf(samples.label_scores()).mean()
    assert best > 0.3
    limits = find_thresholds(samples, 1 - best + 0.01, "marginal")
    assert limits.scores == -math.inf
    sets = PredictionSets(samples.score, limits)
    assert largest_size(sets, N, N) == (1 if samples.score.ranked else N)
    inside, sizes = run(set_model(add_sets(model, sets, N, max_size=N)), logits, ["set", "set_size"])
    assert inside[np.arange(COUNT), labels].mean() == best
    # in single precision several log-odds can be the largest
    assert (sizes == 1).all() if name != "log_odds" else (sizes >= 1).all()


@both
@pytest.mark.parametrize("name", SCORES)
def test_a_rank_limit_holds_at_an_infinite_threshold(model, rows, name, allow_empty):
    logits, _ = rows
    limits = np.full(N, math.inf)
    limits[:6] = score_of(name, N, K).largest(N) if name == "topk" else 0.4
    ranks = 1 + np.arange(N) % 4
    ranks[9] = N  # no limit of either kind: in every set
    sets = PredictionSets(score_of(name, N, K), Thresholds(limits, ranks), 1.0, allow_empty)
    assert largest_size(sets, N, N) <= 4
    inside, marginals = run(set_model(add_sets(model, sets, N, max_size=N)), logits, ["set", "marginals"])
    np.testing.assert_array_equal(inside, sets(logits.astype(np.float64), marginals=marginals))
    assert inside[:, 9].all()
    assert 0 < inside[:, 7].mean() < 0.5


def test_ranks_beyond_those_looked_at_are_no_rank_of_a_class(model, rows):
    samples = head_rows(model, rows, "aps", False)
    few = HeadRows(samples.heads, samples.score, 1.0, 3, samples.rows, samples.labels, False)
    places = samples.label_ranks()
    np.testing.assert_array_equal(few.label_ranks(), np.where(places > 3, N, places))
    np.testing.assert_array_equal(np.isposinf(few.label_scores()), places > 3)
    limits = find_thresholds(few, 0.2, "rc3p")
    assert set(np.unique(limits.max_rank)) <= {1, 2, 3, N}
    at_most_three = np.asarray(limits.max_rank) <= 3
    assert (at_most_three | limits.unlimited(N)).all()
