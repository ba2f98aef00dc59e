import itertools
import math

import pytest
import torch
from torch import distributed as dist

from tests.metrics import test_label_sets as labels
from topk_registry.metrics import ExpectedCalibrationError, LabelSetMetrics, MarginalCalibration, TopKAccuracy


def credit(scores, y, k):
    """The chance that y is among the first k when ties are broken at random, counted over all orders of a row."""
    hits = orders = 0
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            orders += 1
            hits += y in order[:k]
    return hits / orders


def test_accuracies_are_their_definitions():
    n, ks = 5, (1, 2, 4)
    counts = torch.tensor([500, 101, 100, 20, 19])
    logits = torch.randint(0, 4, (60, n)).double()  # four values in five classes: every row has ties
    target = torch.randint(0, n - 1, (60,))  # class 4 has no sample
    metric = TopKAccuracy(ks, num_classes=len(counts), class_counts=counts)
    for rows in torch.arange(60).split(13):
        metric.update(logits[rows], target[rows])
    result = metric.compute()
    for k in ks:
        credits = [credit(s, y, k) for s, y in zip(logits.tolist(), target.tolist(), strict=True)]
        own = [[c for c, y in zip(credits, target.tolist(), strict=True) if y == i] for i in range(n)]
        mean = [sum(c) / len(c) if c else math.nan for c in own]
        assert result[f"top{k}"] == pytest.approx(sum(credits) / 60, rel=1e-12)
        assert result[f"macro_top{k}"] == pytest.approx(sum(mean[:4]) / 4, rel=1e-12)
        assert result[f"many_top{k}"] == pytest.approx((mean[0] + mean[1]) / 2, rel=1e-12)
        assert result[f"medium_top{k}"] == pytest.approx((mean[2] + mean[3]) / 2, rel=1e-12)
        assert math.isnan(result[f"few_top{k}"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_constant_scores_are_at_chance_level(dtype):
    metric = TopKAccuracy((1, 5, 30), num_classes=20)
    metric.update(torch.zeros(40, 20, dtype=dtype), torch.arange(40) % 20)
    assert metric.compute() == pytest.approx(
        {"top1": 0.05, "macro_top1": 0.05, "top5": 0.25, "macro_top5": 0.25, "top30": 1.0, "macro_top30": 1.0}
    )


def test_nan_scores_are_not_hits():
    nan, inf = math.nan, math.inf
    metric = TopKAccuracy((1, 3, 5), num_classes=3)
    metric.update(
        torch.tensor([[nan, nan, nan], [nan, 1.0, 0.0], [0.0, 1.0, nan], [0.0, inf, -inf]]), torch.ones(4).long()
    )
    assert [metric.compute()[f"top{k}"] for k in (1, 3, 5)] == [0.25, 0.75, 0.75]


def test_ignored_rows_and_reset():
    metric = TopKAccuracy(1, num_classes=3, ignore_index=7)
    metric.update(torch.eye(3), torch.tensor([0, 7, 1]))
    assert metric.compute() == {"top1": 0.5, "macro_top1": 0.5}
    metric.reset()
    assert all(math.isnan(value) for value in metric.compute().values())
    metric.update(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert math.isnan(metric.compute()["top1"])


def test_bytes_are_labels_like_any_other():
    """-100, the default ignore_index, is 156 as a byte."""
    metric, calibration = TopKAccuracy(1, num_classes=200), MarginalCalibration(1)
    logits = torch.eye(200)[[156]]
    for each in (metric, calibration):
        each.update(logits, torch.tensor([156], dtype=torch.uint8))
    assert metric.compute()["top1"] == 1.0
    assert calibration.sums["entries"].sum() == 200
    with pytest.raises(ValueError, match=r"labels in \[0, 99\], got 156"):
        TopKAccuracy(1, num_classes=100).update(logits[:, :100], torch.tensor([156], dtype=torch.uint8))


@pytest.mark.parametrize("created_inside", [False, True])
def test_batches_may_come_in_and_out_of_inference_mode(created_inside):
    logits, target = torch.randn(8, 9), torch.arange(8)
    with torch.inference_mode(created_inside):
        metrics = [TopKAccuracy((1, 3), num_classes=9), MarginalCalibration(1)]
    with torch.inference_mode():
        update(metrics, logits.clone(), target.clone())
        inside = [metric.compute() for metric in metrics]
    update(metrics, logits, target)
    for metric, result in zip(metrics, inside, strict=True):
        assert metric.compute() == pytest.approx(result, nan_ok=True)
        metric.reset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0, "num_classes": 3}, "k must be"),
        ({"k": (), "num_classes": 3}, "k must be"),
        ({"k": 2.5, "num_classes": 3}, "k must be"),
        ({"k": (1, 2.5), "num_classes": 3}, "k must be"),
        ({"k": 1, "num_classes": 3, "class_counts": [1, 2]}, r"expected class_counts \[3\]"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        TopKAccuracy(**options)


def test_wrong_batches_are_errors():
    metric = TopKAccuracy(num_classes=3)
    with pytest.raises(ValueError, match="the metric has 3 classes, logits have 4"):
        metric.update(torch.zeros(2, 4), torch.zeros(2).long())
    with pytest.raises(ValueError, match="expected integer labels"):
        metric.update(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"labels in \[0, 2\], got 3"):
        metric.update(torch.zeros(2, 3), torch.tensor([0, 3]))


@pytest.mark.parametrize("of_sets", [False, True])
def test_calibration_error_is_its_definition(of_sets):
    k, bins, kept = 2, 4, torch.arange(30) != 3
    marginals, labels = torch.rand(30, 4), torch.randint(0, 4, (30,)).masked_fill(~kept, -100)
    hits = k * torch.nn.functional.one_hot(labels.clamp(min=0), 4)
    if of_sets:
        kept, hits = kept | True, torch.zeros(30, 4).scatter(1, torch.rand(30, 4).topk(k).indices, 1.0)
    metric = MarginalCalibration(k, bins=bins)
    for rows in torch.arange(30).split(13):
        metric.update(marginals[rows], hits[rows] if of_sets else labels[rows])
    gap = [0.0] * bins
    for p, hit in zip(marginals[kept].double().flatten().tolist(), hits[kept].flatten().tolist(), strict=True):
        gap[(p > 0.25) + (p > 0.5) + (p > 0.75)] += hit - p
    mass = marginals[kept].double().sum().item()
    assert metric.compute()["calibration_error"] == pytest.approx(sum(map(abs, gap)) / mass, rel=1e-12)
    counts = [((marginals[kept] > b / bins) & (marginals[kept] <= (b + 1) / bins)).sum().item() for b in range(bins)]
    assert metric.sums["entries"].tolist() == counts


def test_the_expected_calibration_error_is_its_definition():
    kept, logits = torch.arange(30) != 3, 3 * torch.randn(30, 4, dtype=torch.float64)
    labels = torch.randint(0, 4, (30,)).masked_fill(~kept, -100)
    metric = ExpectedCalibrationError(bins=4)
    for rows in torch.arange(30).split(13):
        metric.update(logits[rows], labels[rows])
    gap = [0.0] * 4
    confidence, predicted = logits.softmax(1).max(1)
    for p, hit in zip(confidence[kept].tolist(), (predicted == labels)[kept].tolist(), strict=True):
        gap[(p > 0.25) + (p > 0.5) + (p > 0.75)] += hit - p
    assert metric.compute()["ece"] == pytest.approx(sum(map(abs, gap)) / 29, rel=1e-12)
    with pytest.raises(ValueError, match="bins"):
        ExpectedCalibrationError(bins=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_expected_calibration_error_of_half_precision_has_no_rounded_probabilities(dtype):
    logits, labels = torch.tensor([[6.0, 0.0]] * 3), torch.tensor([0, 0, 0])
    metric = ExpectedCalibrationError()
    metric.update(logits.to(dtype), labels)
    assert metric.compute()["ece"] == pytest.approx(1 - 1 / (1 + math.exp(-6)), rel=1e-4)


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(100, 9, generator=generator), torch.randint(0, 9, (100,), generator=generator)


def update(metrics, logits, target):
    accuracy, calibration = metrics
    accuracy.update(logits, target)
    calibration.update(logits.softmax(-1), target)


def two_ranks_together_are_one():
    logits, target = batch()
    metrics, alone = ([TopKAccuracy((1, 3), num_classes=9), MarginalCalibration(1)] for _ in range(2))
    update(alone, logits, target)
    # rank 0 has one batch, rank 1 has 5
    for rows in [torch.arange(20)] if dist.get_rank() == 0 else torch.arange(20, 100).split(16):
        update(metrics, logits[rows], target[rows])
    for metric, whole in zip(metrics, alone, strict=True):
        together = metric.compute()
        assert together == pytest.approx(whole.compute(), rel=1e-12)
        assert metric.compute() == together  # computing does not add the ranks' sums a second time
    assert metrics[1].compute(sync=False) != together


def two_ranks_count_label_sets_together():
    logits, target = labels.batch(tied=True)
    mine = slice(0, 60) if dist.get_rank() == 0 else slice(60, labels.N)
    metric = LabelSetMetrics(labels.CLASSES)
    metric.update(logits[mine], target[mine])
    together = metric.compute()
    assert metric.compute() == together == pytest.approx(labels.measured(logits, target))
    assert metric.compute(sync=False)["map"] != pytest.approx(together["map"])


CHECKS = {check.__name__: check for check in (two_ranks_together_are_one, two_ranks_count_label_sets_together)}
