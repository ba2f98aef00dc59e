"""Metrics of several labels: scikit-learn's and timm's numbers, in any batches."""

import math
import warnings

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, recall_score
from timm.task import MultiLabelClassificationEvaluator

from topk_registry.metrics import LabelSetMetrics, TopKAccuracy, average_precision

N, CLASSES = 97, 7


def batch(seed=0, *, tied=False):
    """Logits and targets with a class that nothing has, one that everything has, and rows without labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, CLASSES, generator=generator)
    logits = logits.mul(2).round().div(2) if tied else logits
    target = (torch.rand(N, CLASSES, generator=generator) < 0.3).float()
    target[:, 2], target[:, 4] = 0.0, 1.0
    target[::11] = 0.0
    return logits, target


def measured(logits, target, *, size=13, **options):
    metric = LabelSetMetrics(CLASSES, **options)
    for rows in torch.arange(len(logits)).split(size):
        metric.update(logits[rows], target[rows])
    return metric.compute()


@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("threshold", [0.3, 0.5])
def test_numbers_are_those_of_scikit_learn(tied, threshold):
    logits, target = batch(tied=tied)
    found = measured(logits, target, threshold=threshold)
    truth, claimed = target.numpy(), (logits.sigmoid() >= threshold).numpy()
    present = truth.any(axis=0)
    assert not present.all()
    wanted = average_precision_score(truth[:, present], logits.numpy()[:, present], average="macro")
    assert found["map"] == pytest.approx(wanted, abs=1e-12)
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro"), ("sample_f1", "samples")):
        assert found[name] == pytest.approx(f1_score(truth, claimed, average=average, zero_division=0), abs=1e-12)
    assert found["exact_match"] == pytest.approx((truth == claimed).all(axis=1).mean())


def test_average_precision_of_each_class_is_that_of_scikit_learn():
    logits, target = batch(tied=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the class without a positive sample, which scikit-learn counts as 0
        wanted = average_precision_score(target.numpy(), logits.numpy(), average=None)
    found = average_precision(logits, target.bool())
    assert found[2].isnan()
    assert found.nan_to_num().tolist() == pytest.approx(list(wanted), abs=1e-12)


def test_recall_of_distinct_scores_is_that_of_scikit_learn():
    logits, target = batch()
    labelled = target.any(1)
    found = measured(logits, target, k=(1, 3, 10))
    for k in (1, 3):
        best = torch.zeros(N, CLASSES).scatter(1, logits.topk(k).indices, 1.0)
        wanted = recall_score(target[labelled].numpy(), best[labelled].numpy(), average="samples")
        assert found[f"top{k}_recall"] == pytest.approx(wanted)
    assert found["top10_recall"] == 1.0


def test_recall_of_one_label_each_is_top_k_accuracy_with_ties():
    logits, _ = batch(tied=True)
    labels = torch.arange(N) % CLASSES
    accuracy = TopKAccuracy((1, 2), num_classes=CLASSES)
    accuracy.update(logits, labels)
    wanted = accuracy.compute()
    found = measured(logits, torch.nn.functional.one_hot(labels, CLASSES), k=(1, 2))
    assert [found[f"top{k}_recall"] for k in (1, 2)] == pytest.approx([wanted[f"top{k}"] for k in (1, 2)])


def test_names_and_numbers_are_those_of_timm():
    logits, target = batch(tied=True)
    timms = MultiLabelClassificationEvaluator()
    timms.update(logits, target)
    wanted, found = timms.compute(), measured(logits, target)
    for name in ("micro_f1", "macro_f1", "sample_f1"):
        assert 100 * found[name] == pytest.approx(wanted[name], abs=1e-4)
    assert found["bce"] == pytest.approx(wanted["loss"], rel=1e-6)
    # timm counts a class without a positive sample as 0
    assert 100 * found["map"] * (CLASSES - 1) / CLASSES == pytest.approx(wanted["map"])


def test_nothing_seen_and_nothing_to_find():
    assert all(math.isnan(value) for value in LabelSetMetrics(3).compute().values())
    metric = LabelSetMetrics(3)
    metric.update(torch.full((2, 3), -1.0), torch.zeros(2, 3))
    found = metric.compute()
    assert math.isnan(found["map"])
    assert math.isnan(found["top1_recall"])
    assert (found["micro_f1"], found["exact_match"]) == (0.0, 1.0)
    metric.reset()
    assert math.isnan(metric.compute()["exact_match"])


def test_reset_forgets_the_batches_before():
    metric = LabelSetMetrics(3)
    metric.update(torch.tensor([[2.0, 0.0, 0.0]]), torch.zeros(1, 3))
    metric.reset()
    metric.update(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1, 0, 0]]))
    assert metric.compute()["map"] == 1.0


def test_nan_is_the_worst_score():
    logits, target = torch.tensor([[math.nan, 1.0], [0.0, math.nan]]), torch.tensor([[1, 0], [0, 1]])
    found = measured_of_two(logits, target)
    assert found["map"] == 0.5  # behind the other sample
    assert found["top1_recall"] == found["top2_recall"] == 0.0
    without_labels = measured_of_two(torch.full((1, 2), math.nan), torch.zeros(1, 2))
    assert without_labels["exact_match"] == 0.0


@pytest.mark.parametrize("kind", [torch.int64, torch.int8, torch.float32])
def test_targets_below_a_half_are_no_labels(kind):
    found = measured_of_two(torch.tensor([[2.0, -2.0]]), torch.tensor([[1, -1]], dtype=kind))
    assert (found["exact_match"], found["micro_f1"], found["map"]) == (1.0, 1.0, 1.0)


def measured_of_two(logits, target):
    metric = LabelSetMetrics(2, k=(1, 2))
    metric.update(logits, target)
    return metric.compute()


def test_a_threshold_and_targets_of_any_type():
    logits, target = torch.tensor([[3.0, 2.0]]), torch.tensor([[True, False]])
    metric = LabelSetMetrics(2, threshold=0.9)
    metric.update(logits, target)
    assert metric.compute()["exact_match"] == 1.0
    soft = LabelSetMetrics(2)
    soft.update(logits, torch.tensor([[0.7, 0.5]]))
    assert soft.compute()["exact_match"] == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LabelSetMetrics(3, threshold=1.0), "threshold must be in"),
        (lambda: LabelSetMetrics(3).update(torch.zeros(2, 3), torch.zeros(2)), r"targets \[batch, 3\]"),
        (lambda: LabelSetMetrics(3).update(torch.zeros(2, 4), torch.zeros(2, 4)), r"targets \[batch, 3\]"),
        (lambda: average_precision(torch.zeros(2, 3), torch.zeros(2, 3)), "boolean labels"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
