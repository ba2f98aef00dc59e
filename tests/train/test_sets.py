"""Prediction sets of an evaluation: half of the samples calibrates, and the other half is covered as asked."""

import math

import numpy as np
import pytest
import torch

from tests.conformal.rows import labelled_rows, model_rows
from topk_registry.conformal import LabelCounts, false_negative_control
from topk_registry.train.config.validate_flags import SETS
from topk_registry.train.engine.sets import LabelSetEvaluation, SetEvaluation
from topk_registry.train.errors import TrainError

COUNT, ALPHA = 4000, 0.2


def evaluated(score, alpha=ALPHA):
    logits, labels = model_rows(COUNT, 8, seed=5, sharpness=6.0)
    options = {"k": 3} if score == "log-odds" else {}
    evaluation = SetEvaluation(score, alpha, options, seed=0)
    for part in torch.arange(COUNT).split(700):
        evaluation.update(torch.from_numpy(logits[part]).softmax(-1), torch.from_numpy(labels[part]))
    best = (logits.argmax(-1) == labels).mean()
    return evaluation.results(), 100 * best


@pytest.mark.parametrize("score", SETS)
def test_every_score_covers_what_was_asked_for_and_no_more(score):
    found, best = evaluated(score)
    # the threshold of 1600 to 2000 samples, and 2000 that are measured: four deviations
    error = 400 * math.sqrt(ALPHA * (1 - ALPHA) * (1 / 1600 + 1 / 2000))
    assert best < 75
    assert found["set_coverage"] > 80 - error
    if score != "topk":  # one rank covers many samples
        assert found["set_coverage"] < 80 + error
    assert found["set_empty"] == 0
    assert ("set_penalty" in found) == (score == "raps")
    assert ("set_weight" in found) == (score == "saps")


def test_a_best_class_that_is_enough_stands_alone():
    found, best = evaluated("aps", 0.6)
    assert best > 60
    assert found["set_mean_size"] == found["set_median_size"] == 1
    assert found["set_singletons"] == 100
    assert found["set_coverage"] == pytest.approx(best, abs=4 * 100 * math.sqrt(0.25 / 2000))
    assert np.isfinite(list(found.values())).all()


def test_a_score_that_learns_from_labels_has_nothing_to_learn_from():
    with pytest.raises(TrainError, match="score pas learns its options from labels"):
        SetEvaluation("pas", 0.1, {}, seed=0)


def test_sets_of_several_labels_are_those_of_risk_control():
    p, targets = labelled_rows(300, seed=4)
    observer = LabelSetEvaluation("risk-control", 0.2, seed=7)
    for start in range(0, 300, 64):
        observer.update(*(torch.from_numpy(part[start : start + 64]).float() for part in (p, targets)))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(7)).numpy()
    single = p.astype(np.float32)
    sets = false_negative_control(single[order[150:]], targets[order[150:]], 0.2)
    counts = LabelCounts.of(sets(single[order[:150]]), targets[order[:150]])
    found = observer.results()
    assert found["set_false_negative_rate"] == pytest.approx(100 * counts.summary()["false_negative_rate"])
    assert found["set_mean_size"] == pytest.approx(counts.summary()["mean_size"])
    low, high = counts.interval
    assert (found["set_false_negative_rate_low"], found["set_false_negative_rate_high"]) == (100 * low, 100 * high)


@pytest.mark.parametrize(
    ("rule", "alpha", "message"),
    [
        ("raps", 0.1, "with --task multilabel there are sets by risk-control, got 'raps'"),
        ("risk-control", 1.5, "must be above 0 and below 1"),
        ("risk-control", 0.01, "5 calibration samples are too few for alpha = 0.01: it takes 99"),
    ],
)
def test_sets_of_several_labels_that_cannot_be_say_why(rule, alpha, message):
    p, targets = labelled_rows(10)
    with pytest.raises(TrainError, match=message):
        _results(rule, alpha, p, targets)


def _results(rule, alpha, p, targets):
    observer = LabelSetEvaluation(rule, alpha, seed=0)
    observer.update(torch.from_numpy(p), torch.from_numpy(targets))
    return observer.results()
