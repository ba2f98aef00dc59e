"""The contract of registered data sets: the kit finds each fault, and training says it before it begins."""

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image

from topk_registry.cli import main as cli
from topk_registry.registry import datasets
from topk_registry.testing import ChecksFailedError, check_dataset
from topk_registry.testing.datasets import CHECKS, dataset_subject, run_dataset_checks

SPLITS = {"train": 0, "validation": 1}


class Spots:
    """Images of one grey each, whose label is in their first pixel."""

    def __init__(self, split="train", *, size=12, seed=0):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        self.classes = ["dark", "middle", "light"]
        self.superclasses = ["a", "a", "b"]
        self.targets = [i % 3 for i in range(size)]
        self.transform = None
        self.pixels = np.random.default_rng([seed, SPLITS[split]]).integers(0, 256, (size, 8, 8, 3), np.uint8)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        image = Image.fromarray(self.pixels[i])
        return (image if self.transform is None else self.transform(image)), self.targets[i]


class IgnoresTheTransform(Spots):
    def __getitem__(self, i):
        return Image.fromarray(self.pixels[i]), self.targets[i]


class WorksAfterTheTransform(Spots):
    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return (image if self.transform is None else [image]), label


class TransformsTensors(Spots):
    def __getitem__(self, i):
        image = Image.fromarray(self.pixels[i])
        return (image if self.transform is None else self.transform(torch.zeros(3, 8, 8))), self.targets[i]


class GivesTensors(Spots):
    def __getitem__(self, i):
        return torch.from_numpy(self.pixels[i]).permute(2, 0, 1) / 255, self.targets[i]


class GivesTriples(Spots):
    def __getitem__(self, i):
        return *super().__getitem__(i), i


class GivesFloats(Spots):
    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return image, float(label)


class CountsFromOne(Spots):
    def __init__(self, split="train"):
        super().__init__(split)
        self.targets = [label + 1 for label in self.targets]


class TakesAnySplit(Spots):
    def __init__(self, split="train"):
        super().__init__(split if split in SPLITS else "train")


class TrainsOnEverything(Spots):
    def __init__(self, split="train"):
        super().__init__(split)
        self.pixels = Spots("train").pixels


class NamesNoClasses(Spots):
    classes = property(lambda self: None, lambda self, names: None)


class NamesTwiceTheSame(Spots):
    def __init__(self, split="train"):
        super().__init__(split)
        self.classes = ["dark", "dark", "light"]


class NamesOthersInEvaluation(Spots):
    def __init__(self, split="train"):
        super().__init__(split)
        self.classes = self.classes if split == "train" else ["dark", "light", "middle"]


class ListsOtherLabels(Spots):
    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return image, (label + 1) % 3


class ListsFewerLabels(Spots):
    def __len__(self):
        return super().__len__() - 1


class FewFamilies(Spots):
    def __init__(self, split="train"):
        super().__init__(split)
        self.superclasses = ["a", "b"]


class DrawsFromItsOwnClock(Spots):
    clock = random.Random(3)

    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return (image.rotate(90 * self.clock.randrange(4)) if self.transform is None else image), label


class HoldsALambda(Spots):
    def __init__(self, split="train"):
        super().__init__(split)
        self.load = lambda i: i


class IsEmpty(Spots):
    def __init__(self, split="train"):
        super().__init__(split, size=0)


class FailsToRead(Spots):
    def __getitem__(self, i):
        raise OSError("disk full")


def no_data_set(split):
    return {"train": 3}.items() if split in SPLITS else 1 / 0


def test_a_good_one_passes_every_check():
    results = {result.name: result for result in run_dataset_checks(dataset_subject(Spots))}
    assert list(results) == list(CHECKS)
    assert {result.status for result in results.values()} == {"passed"}
    assert all(result.why for result in results.values())


@pytest.mark.parametrize("name", ["hierarchy", "ambiguous"])
def test_ours_pass(name):
    check_dataset(name, options={"size": 60})


@pytest.mark.parametrize(
    ("factory", "check", "said"),
    [
        (TakesAnySplit, "refuses_an_unknown_split", "expected a ValueError for split 'no-such-split'"),
        (IsEmpty, "has_samples", "expected samples in split 'train', got none"),
        (no_data_set, "has_samples", "got dict_items; it has no __getitem__"),
        (FailsToRead, "gives_images_and_labels", "expected no error, got OSError: disk full"),
        (GivesTriples, "gives_images_and_labels", "train[0]: a sample is a tuple (image, label), got a tuple of 3"),
        (GivesTensors, "gives_images_and_labels", "is a PIL image, got Tensor torch.float32 [3, 8, 8]"),
        (GivesFloats, "gives_images_and_labels", "a label is a whole number, got float 0.0"),
        (NamesNoClasses, "names_its_classes", "expected an attribute classes"),
        (NamesTwiceTheSame, "names_its_classes", "expected a name for each class, got 'dark' twice"),
        (NamesOthersInEvaluation, "names_its_classes", "got 'middle' and 'light' as class 1"),
        (CountsFromOne, "keeps_labels_in_range", "labels count from 0 to 2, as there are 3 classes, got 3"),
        (ListsOtherLabels, "lists_its_labels", "train: targets[0] is 0, and the sample has 1"),
        (ListsFewerLabels, "lists_its_labels", "expected 11 targets in 'train', got 12"),
        (FewFamilies, "knows_its_families", "expected 3 superclasses in 'train', got 2"),
        (IgnoresTheTransform, "applies_the_transform", "dataset.transform was set and not called"),
        (WorksAfterTheTransform, "applies_the_transform", "must be what the transform returned, got a list of 1"),
        (TransformsTensors, "applies_the_transform", "called with a PIL image, got Tensor torch.float32 [3, 8, 8]"),
        (DrawsFromItsOwnClock, "repeats_under_a_seed", "to be the same under the same seed, got another"),
        (TrainsOnEverything, "keeps_splits_apart", "12 of 12 images of 'validation' are in 'train'"),
        (HoldsALambda, "reaches_other_processes", "expected 'train' to be pickled"),
        (IgnoresTheTransform, "makes_a_batch", "expected no error, got AssertionError"),
    ],
)
def test_a_fault_is_found_by_its_check(factory, check, said):
    results = {result.name: result for result in run_dataset_checks(dataset_subject(factory))}
    assert results[check].status == "failed"
    assert said in results[check].message
    with pytest.raises(ChecksFailedError, match=check):
        check_dataset(factory)


def test_what_is_optional_is_left_out():
    class Bare(Spots):
        def __init__(self, split="train"):
            super().__init__(split)
            self.labels_of_mine = self.targets
            del self.targets, self.superclasses

        def __len__(self):
            return len(self.labels_of_mine)

        def __getitem__(self, i):
            image = Image.fromarray(self.pixels[i])
            return (image if self.transform is None else self.transform(image)), self.labels_of_mine[i]

    skipped = {r.name: r.message for r in run_dataset_checks(dataset_subject(Bare)) if r.status == "skipped"}
    assert set(skipped) == {"lists_its_labels", "knows_its_families"}


@pytest.fixture
def spots():
    datasets.register("spots", override=True)(Spots)
    yield
    datasets.unregister("spots")


def test_the_command_prints_each_check(spots, capsys):
    assert cli.main(["check-dataset", "topk/spots", "--dataset-opt", "size=6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(CHECKS)
    assert lines[-1] == f"{len(CHECKS)} passed"


def test_the_command_tells_failures_as_json(spots, capsys):
    assert cli.main(["check-dataset", "spots", "--val-split", "train", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["splits"] == ["train", "train"]
    assert [result["name"] for result in report["results"] if result["status"] == "failed"] == ["keeps_splits_apart"]


def test_the_command_answers_wrong_words_in_one_line(spots, capsys):
    assert cli.main(["check-dataset", "spots", "--dataset-opt", "sise=6"]) == 2
    assert "takes no option 'sise'; did you mean 'size'?" in capsys.readouterr().err
    assert cli.main(["check-dataset", "sptos"]) == 1
    assert "the closest are spots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (IgnoresTheTransform, "dataset.transform was set and not called"),
        (GivesTensors, "without a transform the image of a sample is a PIL image"),
        (CountsFromOne, "labels count from 0 to 2"),
    ],
)
def test_training_says_it_before_it_begins(factory, said, tmp_path, capsys):
    class Shifted(factory):
        def __getitem__(self, i):
            return super().__getitem__(i - 1)

    datasets.register("spots", override=True)(Shifted)
    try:
        argv = ["train", "--dataset", "topk/spots", "-j", "0", "--device", "cpu", "--output", str(tmp_path)]
        assert cli.main(argv) == 2
    finally:
        datasets.unregister("spots")
    error = capsys.readouterr().err
    assert said in error
    assert "`topk-registry check-dataset spots` tries all that training asks of it" in error
