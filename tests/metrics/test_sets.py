"""Coverage and sizes of sets, counted by hand."""

import math

import numpy as np
import pytest
import torch

from topk_registry.conformal import SetCounts
from topk_registry.metrics import SetCoverage

SETS = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
LABELS = torch.tensor([1, 2, 0, 1])


def test_by_hand():
    metric = SetCoverage(class_counts=[200, 50, 3])
    metric.update(SETS[:1], LABELS[:1])
    metric.update(SETS[1:], LABELS[1:])
    assert metric.compute() == pytest.approx(
        {
            "coverage": 0.5,
            "mean_size": 1.5,
            "median_size": 1.0,
            "singletons": 0.25,
            "empty": 0.25,
            "macro_coverage": 1 / 3,
            "worst_class_coverage": 0.0,
            "worst_size_coverage": 0.0,
            "many_coverage": 0.0,
            "medium_coverage": 1.0,
            "few_coverage": 0.0,
        }
    )
    rows = metric.counts().by_size()
    found = [(row["size"], row["samples"], row["coverage"]) for row in rows]
    assert found == [("0", 1, 0), ("1", 1, 0), ("2 to 3", 2, 1)]


def test_it_counts_as_arrays_do():
    rng = np.random.default_rng(0)
    sets, labels = rng.random((200, 7)) < 0.4, rng.integers(0, 7, 200)
    metric = SetCoverage(7)
    for part in range(0, 200, 32):
        metric.update(torch.from_numpy(sets[part : part + 32]), torch.from_numpy(labels[part : part + 32]))
    counts = SetCounts.of(sets, labels)
    halves = SetCounts.of(sets[:50], labels[:50]) + SetCounts.of(sets[50:], labels[50:])
    for name, value in vars(counts).items():
        np.testing.assert_array_equal(vars(metric.counts())[name], value)
        np.testing.assert_array_equal(vars(halves)[name], value)
    assert counts.summary()["coverage"] == sets[np.arange(200), labels].mean()


def test_one_percent_of_the_samples_is_a_range_of_sizes():
    """0.01 times 700 is a little more than 7 in floating point."""
    sets = np.zeros((700, 3), bool)
    sets[:693, 0] = True
    assert SetCounts.of(sets, np.zeros(700, int)).summary()["worst_size_coverage"] == 0


def test_ignored_and_absent():
    metric = SetCoverage(3)
    assert metric.compute() == {}
    metric.update(SETS, torch.tensor([-100, 2, -100, 1]))
    assert metric.compute()["coverage"] == 0.5
    metric = SetCoverage(class_counts=[200, 50, 3])
    metric.update(SETS[:1], LABELS[:1])
    assert math.isnan(metric.compute()["few_coverage"])


@pytest.mark.parametrize(
    ("sets", "labels", "message"),
    [
        (SETS.float(), LABELS, r"sets must be bool \[B, 3\], got torch.float32 \[4, 3\]"),
        (SETS[:, :2], LABELS, r"sets must be bool \[B, 3\]"),
        (SETS, LABELS + 2, "target"),
    ],
)
def test_bad_input(sets, labels, message):
    with pytest.raises(ValueError, match=message):
        SetCoverage(3).update(sets, labels)
