"""Prediction sets of an evaluation: half of the samples calibrates, and the other half is covered as asked."""

import math

import numpy as np
import pytest
import torch

from tests.conformal.rows import families, labelled_rows, model_rows
from topk_registry.conformal import LabelCounts, Tree, binomial_interval, calibrate, false_negative_control
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


@pytest.mark.parametrize("nodes", [1, 2])
def test_sets_along_a_tree_are_those_of_the_definition(nodes):
    logits, labels = model_rows(500, 8, seed=3)
    score = Tree(families(8), nodes)
    evaluation = SetEvaluation("tree", 0.1, {"parents": families(8), "nodes": nodes}, seed=4)
    for part in torch.arange(500).split(64):
        evaluation.update(torch.from_numpy(logits[part]).softmax(-1), torch.from_numpy(labels[part]))
    found = evaluation.results()
    order = torch.randperm(500, generator=torch.Generator().manual_seed(4)).numpy()
    measured, rest = order[:250], order[250:]
    p = np.float64(torch.from_numpy(logits).softmax(-1).float().numpy())
    inside = calibrate(np.log(p[rest]), labels[rest], alpha=0.1, score=score)(np.log(p[measured]))
    assert found["set_coverage"] == pytest.approx(100 * inside[np.arange(250), labels[measured]].mean())
    assert found["set_mean_size"] == pytest.approx(inside.sum(-1).mean())
    assert found["set_mean_nodes"] == pytest.approx((score.nodes_of(p[measured], inside) >= 0).sum(-1).mean())
    assert 1 <= found["set_mean_nodes"] <= nodes == found["set_nodes"]
    sizes = evaluation.tables()["set_by_size"]
    assert sum(row["samples"] for row in sizes) == 250
    assert all(row["interval"][0] <= row["coverage"] <= row["interval"][1] for row in sizes)


def rows_by_group(count, seed):
    """Rows of which those of group "b", a third, are harder than the model knows; and the groups."""
    logits, labels = model_rows(count, 8, seed=seed)
    rng = np.random.default_rng([seed, 1])
    groups = np.where(rng.random(count) < 1 / 3, "b", "a")
    moved = (groups == "b") & (rng.random(count) < 0.3)
    labels = np.where(moved, rng.integers(0, 8, count), labels)
    return logits, labels, groups.tolist()


@pytest.mark.parametrize("score", ["lac", "tree"])
def test_each_group_is_covered_as_asked(score):
    """Over repetitions the coverage of each group is 1 - alpha, where one threshold leaves the hard group below."""
    options = {"parents": families(8)} if score == "tree" else {}
    hits, seen, single, alpha = {"a": 0, "b": 0}, {"a": 0, "b": 0}, {"a": 0, "b": 0}, 0.2
    for seed in range(60):
        logits, labels, groups = rows_by_group(300, seed)
        evaluation = SetEvaluation(score, alpha, options, seed=seed, groups=groups)
        evaluation.update(torch.from_numpy(logits).softmax(-1), torch.from_numpy(labels))
        evaluation.results()
        for row in evaluation.by_group:
            hits[row.name] += row.hits
            seen[row.name] += row.seen
            assert row.missing == 0
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed)).numpy()
        sets = calibrate(logits[order[150:]], labels[order[150:]], alpha=alpha, score=score, **options)
        inside = sets(logits[order[:150]])[np.arange(150), labels[order[:150]]]
        for name in single:
            single[name] += int(inside[np.array(groups)[order[:150]] == name].sum())
    for name, total in seen.items():
        # calibrated on about half of the group's samples a repetition, and measured on as many: four deviations
        error = 4 * math.sqrt(alpha * (1 - alpha) * 2 / total)
        assert hits[name] / total > 1 - alpha - error
        if score == "lac":  # nodes come in steps, and their sets cover more
            assert hits[name] / total < 1 - alpha + 1 / 45 + error  # 1 / (N + 1), N about 50 and more
    assert single["b"] / seen["b"] < 1 - alpha - 0.05 < 1 - alpha < single["a"] / seen["a"]


def test_a_group_of_too_few_samples_has_all_classes_and_says_what_it_lacks():
    logits, labels, groups = rows_by_group(300, 0)
    groups[7] = groups[11] = groups[200] = 'r"a, re'
    evaluation = SetEvaluation("lac", 0.1, {}, seed=0, groups=groups)
    evaluation.update(torch.from_numpy(logits).softmax(-1), torch.from_numpy(labels))
    evaluation.results()
    rows = {row["group"]: row for row in evaluation.tables()["set_by_group"]}
    assert list(rows) == ["a", "b", 'r"a, re']
    rare = rows['r"a, re']
    assert rare["calibration_samples"] + rare["samples"] == 3
    assert rare["missing"] == 9 - rare["calibration_samples"]
    if rare["samples"]:
        assert (rare["coverage"], rare["mean_size"]) == (100, 8)
    for name, row in rows.items():
        (own,) = (each for each in evaluation.by_group if each.name == name)
        if row["samples"]:
            assert row["interval"] == pytest.approx([100 * x for x in binomial_interval(own.hits, own.seen)], abs=1e-4)
    lacks = [group.lack for group in evaluation.by_group]
    samples = rare["calibration_samples"]
    assert lacks == ["", "", f'group r"a, re has {samples} calibration samples, {9 - samples} fewer than a threshold '
                     "takes, so its sets hold all classes"]  # fmt: skip
    evaluation.groups = groups[:-1]
    with pytest.raises(TrainError, match="expected a group for each of 300 samples, got 299"):
        evaluation.results()


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
