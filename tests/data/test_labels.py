"""Labels and superclasses, wherever a data set keeps them."""

import numpy as np
import pytest
import torch
from torchvision.datasets import FakeData

from topk_registry.data.cifar100 import CLASSES, FAMILIES, SUPERCLASSES
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.data.labels import (
    class_counts,
    kept_labels_of,
    labels_of,
    superclasses_of,
)


class Kept:
    def __init__(self, **kept):
        self.__dict__.update(kept)


@pytest.mark.parametrize(
    "dataset",
    [
        Kept(targets=[2, 0, 1]),
        Kept(labels=np.asarray([2, 0, 1])),
        Kept(targets=torch.tensor([2, 0, 1])),
        Kept(reader=Kept(samples=[("a", 2), ("b", 0), ("c", 1)])),
        Kept(reader=Kept(iter_targets=lambda: iter([2, 0, 1]))),
    ],
)
def test_kept_labels_are_found(dataset):
    assert labels_of(dataset).tolist() == [2, 0, 1]


def test_labels_are_loaded_only_where_they_are_not_kept():
    data = FakeData(5, (3, 8, 8), num_classes=3, transform=lambda image: pytest.fail("no image need be transformed"))
    assert kept_labels_of(data) is None
    transform = data.transform
    assert labels_of(data).tolist() == [FakeData(5, (3, 8, 8), num_classes=3)[i][1] for i in range(5)]
    assert data.transform is transform


def test_a_label_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"labels in \[0, 4\], got 7"):
        class_counts(np.asarray([0, 7]), 5)


def test_cifar_100_is_as_published():
    """Against the coarse label of each fine label as the data set's own files have it."""
    coarse = [4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7]
    coarse += [6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10]
    coarse += [16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16]
    coarse += [12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13]
    assert coarse == SUPERCLASSES
    assert list(FAMILIES) == sorted(FAMILIES)
    assert (CLASSES[0], CLASSES[-1]) == ("apple", "worm")
    assert superclasses_of(Kept(classes=CLASSES)) == coarse


def test_superclasses_of_the_built_in_data():
    assert superclasses_of(Hierarchy(size=2)) == [c % 20 for c in range(100)]


def test_superclasses_may_be_unknown():
    assert superclasses_of(Kept(classes=["a", "b"])) is None
