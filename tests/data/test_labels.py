"""Labels and superclasses, wherever a data set keeps them."""

import numpy as np
import pytest
import torch
from torchvision.datasets import FakeData

from topk_registry.data.labels import class_counts, kept_labels_of, labels_of


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
