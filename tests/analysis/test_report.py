"""The report: its numbers beside other packages', on ties and absent classes too."""

import json
import math

import numpy as np
import pytest

from topk_registry.analysis import (
    brier_score,
    calibration_error,
    confused_pairs,
    look_alikes,
    reliability,
    report,
    report_page,
    risk_coverage,
    smooth_calibration_error,
)
from topk_registry.analysis.confusion import confusion_matrix, suggested_k
from topk_registry.data.labels import superclasses_of


@pytest.fixture(scope="module")
def case():
    """Scores with ties and labels with an absent class."""
    rng = np.random.default_rng(0)
    labels = rng.choice([0, 1, 2, 4, 5], 400)
    logits = np.round(2 * np.eye(7)[labels] + rng.normal(size=(400, 7)), 1)
    logits[:, 6] = -30.0  # a class that is never best
    return logits, labels


def softmax(logits):
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def events(count=2000, seed=1):
    """Probabilities, some equal, of events that come true less often than they say where they are high."""
    rng = np.random.default_rng(seed)
    p = np.round(rng.beta(2, 1, count), 2)
    return p, (rng.random(count) < p**1.5 + 0.05).astype(float)


def test_precision_and_recall_are_those_of_scikit_learn(case):
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = case
    found = report(logits, labels, k=(1, 3))
    precision, recall, _, support = metrics.precision_recall_fscore_support(
        labels, logits.argmax(1), labels=range(7), zero_division=np.nan
    )
    for row, p, r, s in zip(found.classes, precision, recall, support, strict=True):
        assert row.support == s
        assert row.precision == (None if math.isnan(p) else pytest.approx(p))
        assert row.recall == (None if math.isnan(r) else pytest.approx(r))
    assert found.classes[3].recall is None, "an absent class has no recall"
    assert found.classes[6].precision is None, "a class that is never best has no precision"
    expected = metrics.confusion_matrix(labels, logits.argmax(1), labels=range(7))
    assert np.array_equal(confusion_matrix(logits.argmax(1), labels, 7), expected)


def test_accuracies_and_recalls_are_those_of_the_metrics(case):
    import torch
    from torchmetrics.classification import MulticlassAccuracy

    from topk_registry.metrics import TopKAccuracy

    logits, labels = case
    found = report(logits, labels, k=(1, 3))
    own = TopKAccuracy((1, 3), num_classes=7)
    own.update(torch.from_numpy(logits), torch.from_numpy(labels))
    for name, value in own.compute().items():
        assert found.summary[name] == pytest.approx(value)
    rng = np.random.default_rng(5)
    apart = logits + 1e-6 * rng.normal(size=logits.shape)  # torchmetrics breaks ties by position
    for average, name in (("micro", "top3"), ("macro", "macro_top3")):
        theirs = MulticlassAccuracy(num_classes=7, top_k=3, average=average)
        value = theirs(torch.from_numpy(apart), torch.from_numpy(labels))
        assert report(apart, labels, k=(3,)).summary[name] == pytest.approx(float(value), abs=1e-6)


def test_the_brier_score_is_that_of_scikit_learn(case):
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = case
    p = softmax(logits)
    expected = metrics.brier_score_loss(labels, p, labels=range(7), scale_by_half=False)
    assert brier_score(p, labels) == pytest.approx(expected)
    found = report(logits, labels)
    assert found.summary["brier"] == pytest.approx(expected)
    for c, row in enumerate(found.classes):
        assert row.brier == pytest.approx(np.square(p[:, c] - (labels == c)).mean())
    assert sum(row.brier for row in found.classes) == pytest.approx(expected)


def test_bins_of_equal_width_are_those_of_torchmetrics():
    import torch
    from torchmetrics.functional.classification import binary_calibration_error

    p, hits = events()
    p = (p + 1e-6).clip(max=1.0)  # off the edges, which belong to the bin below here and above there
    theirs = binary_calibration_error(torch.from_numpy(p), torch.from_numpy(hits).long(), n_bins=15)
    assert calibration_error(p, hits, equal_width=True) == pytest.approx(float(theirs), abs=1e-6)


def test_bins_of_equal_mass_are_those_of_mapie():
    calibration = pytest.importorskip("mapie.metrics.calibration")
    rng = np.random.default_rng(2)
    p = rng.beta(2, 1, 1500)  # none equal
    hits = (rng.random(1500) < p**1.5).astype(int)
    for bins in (5, 15):
        expected = calibration.expected_calibration_error(hits, p, num_bins=bins, split_strategy="quantile")
        assert calibration_error(p, hits, bins=bins) == pytest.approx(expected, abs=2 * bins / 1500)
        found = reliability(p, hits, bins=bins)
        assert found.images.sum() == 1500
        assert found.images.max() - found.images.min() <= 1


def test_bins_do_not_part_equal_probabilities():
    p, hits = events()
    order = np.random.default_rng(3).permutation(len(p))
    first, again = reliability(p, hits), reliability(p[order], hits[order])
    assert np.allclose(first.observed, again.observed)
    assert first.calibration_error == pytest.approx(again.calibration_error)
    same = reliability(np.full(100, 0.7), np.arange(100) < 40)
    assert same.images.tolist() == [100]
    assert same.calibration_error == pytest.approx(0.3)


def smooth_by_definition(p, hits):
    """The fixed point by direct sums over images and their mirror images, on a fine grid."""
    t = np.linspace(0, 1, 2001)
    values, where = np.unique(p, return_inverse=True)
    residual = np.bincount(where, hits - p) / len(p)

    def error(s):
        total = np.zeros_like(t)
        for m in range(-2, 3):
            for centre in (2 * m + values, 2 * m - values):
                z = (t[:, None] - centre) / s
                total += np.exp(-0.5 * z * z) @ residual / (s * math.sqrt(2 * math.pi))
        total = np.abs(total)
        return (total.sum() - (total[0] + total[-1]) / 2) / (len(t) - 1)

    low, high = 1e-3, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > middle else (low, middle)
    return low


@pytest.mark.parametrize("seed", [1, 2])
def test_the_smooth_calibration_error_is_its_definition(seed):
    p, hits = events(seed=seed)
    assert smooth_calibration_error(p, hits) == pytest.approx(smooth_by_definition(p, hits), abs=3e-4)
    ends = np.repeat([0.0, 1.0], 50)
    wrong = np.concatenate((np.arange(50) < 20, np.arange(50) >= 20)).astype(float)
    assert smooth_calibration_error(ends, wrong) == pytest.approx(smooth_by_definition(ends, wrong), abs=3e-4)


def test_the_smooth_error_goes_to_zero_where_probabilities_come_true_and_to_the_gap_where_they_do_not():
    rng = np.random.default_rng(4)
    p = rng.random(100_000)
    assert smooth_calibration_error(p, rng.random(100_000) < p) < 0.01
    assert smooth_calibration_error(np.full(1000, 0.75), np.arange(1000) < 500) == pytest.approx(0.25, abs=0.01)


def test_marginals_have_the_metric_of_training(case):
    import torch

    from topk_registry.functional import topk_marginals
    from topk_registry.metrics import MarginalCalibration

    logits, labels = case
    found = report(logits, labels, k=(1, 3), bins=6).marginals[3]
    assert 3 <= len(found.predicted) <= 6
    middles = [(a + b) / 2 for a, b in zip(found.predicted, found.predicted[1:], strict=False)]
    marginals = topk_marginals(torch.from_numpy(logits), 3)
    assert marginals.sum().item() == pytest.approx(3 * 400)
    # any edges between the bins' means that part the same marginals would do; the error needs no more than the sums
    metric = MarginalCalibration(3, bins=[0.0, *middles, 1.0])
    metric.update(marginals, torch.from_numpy(labels))
    assert metric.compute()["calibration_error"] == pytest.approx(found.calibration_error, abs=0.05)
    assert found.predicted == sorted(found.predicted)


def test_risk_is_the_mean_over_random_orders_of_equal_confidence():
    rng = np.random.default_rng(6)
    confidence, wrong = rng.integers(0, 4, 12) / 4, (rng.random(12) < 0.4).astype(float)
    total = np.zeros(12)
    for _ in range(4000):
        order = np.lexsort((rng.random(12), -confidence))
        total += np.cumsum(wrong[order]) / np.arange(1, 13)
    found = risk_coverage(confidence, wrong)
    assert np.abs(found.risk - total / 4000).max() < 0.03
    assert found.risk[-1] == pytest.approx(wrong.mean())
    assert found.area == pytest.approx(found.risk.mean())
    best = risk_coverage(-wrong, wrong)
    assert best.area == pytest.approx(found.least)
    assert best.at_risk(0.0) == pytest.approx(1 - wrong.mean())
    assert risk_coverage(np.ones(3), np.ones(3)).at_risk(0.5) == 0.0
    for certain, errors in (([0.5, np.nan], [0, 1]), ([0.5, 0.4], [0, np.nan]), ([0.5, 0.4], [0, 2])):
        with pytest.raises(ValueError, match="confidence must be numbers, and errors numbers from 0 to 1"):
            risk_coverage(certain, errors)


def test_pairs_count_both_directions_and_the_most_come_first():
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    best = np.array([1, 1, 0, 0, 1, 2, 0, 2])
    (first, second) = confused_pairs(np.eye(3)[best], labels)
    assert (first.a, first.b, first.a_as_b, first.b_as_a, first.share) == (0, 1, 2, 1, 0.6)
    assert (second.a, second.b, second.a_as_b, second.b_as_a) == (0, 2, 0, 1)
    assert confused_pairs(np.eye(3)[labels], labels) == []


def test_look_alikes_are_the_families_that_scores_cannot_tell_apart():
    rng = np.random.default_rng(7)
    family = np.array([0, 1, 2, 0, 1, 2, 0, 1, 3, 4])  # three families of three, three, two; two classes alone
    labels = rng.integers(0, 10, 3000)
    logits = 5.0 * (family[labels][:, None] == family) + 0.5 * rng.normal(size=(3000, 10))
    groups = look_alikes(logits, labels)
    assert groups == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert suggested_k(groups, labels) == 3
    assert look_alikes(rng.normal(size=(3000, 10)) * 0.1, labels) == []
    assert suggested_k([], labels) is None
    assert look_alikes(np.zeros((4, 2)), np.array([0, 1, 0, 1])) in ([], [[0, 1]])


def test_superclasses_are_what_training_takes(case, tmp_path):
    logits, labels = case

    class Named:
        classes = tuple("abcdefg")

    family = np.array([0, 1, 0, 1, 0, 1, 2])
    alike = 6.0 * (family[labels][:, None] == family) + 0.1 * logits
    found = report(alike, labels, class_names=Named.classes)
    file = tmp_path / "groups.json"
    file.write_text(json.dumps(found.superclasses()))
    numbers = superclasses_of(Named, file)
    for group in found.groups:
        assert len({numbers[c] for c in group}) == 1
    assert len(set(numbers)) == 7 - sum(len(group) - 1 for group in found.groups)
    assert found.groups


def test_the_worst_images_have_the_least_probable_labels(case):
    logits, labels = case
    found = report(logits, labels, worst=5)
    own = softmax(logits)[np.arange(400), labels]
    assert np.allclose(np.sort(own[found.worst]), np.sort(own)[:5])


def test_findings_are_plain_types_and_a_page(case):
    logits, labels = case
    found = report(logits, labels, name="<m>", class_names=[f"<{i}>" for i in range(7)], k=(1, 3, 7))
    content = json.loads(json.dumps(found.to_dict()))
    assert list(content["reliability"]) == ["1", "3"], "a set of all classes is always right"
    assert len(content["worst"]) == 48
    page = report_page(found, lambda i: "data:image/jpeg;base64,AAAA", lambda i: f"file {i}.png")
    assert "&lt;m&gt;" in page
    assert "<m>" not in page
    assert f"file {found.worst[0]}.png" in page
    assert page.count("<svg") == 2 + 3


def test_what_cannot_be_reported_is_refused():
    with pytest.raises(ValueError, match="3 names of classes, got 2"):
        report(np.eye(3), np.arange(3), class_names=["a", "b"])
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        calibration_error(np.array([1.5]), np.array([1.0]))
    with pytest.raises(ValueError, match="of each image"):
        risk_coverage(np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="bins must be at least 1"):
        reliability(np.ones(3), np.ones(3), bins=0)


def test_a_perfect_classifier_of_few_images_has_a_report():
    found = report(50 * np.eye(3), np.arange(3))
    assert found.summary["top1"] == 1.0
    assert found.groups == []
    assert found.pairs == []
    assert "No image has another best class" in report_page(found)
