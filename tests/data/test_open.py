"""Data sets by name: built-in ones, folders, timm's, plug-ins, and the options that change them."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from topk_registry import registry
from topk_registry.data import Hierarchy, open_dataset
from topk_registry.data.open import CHANGES, first_problem
from topk_registry.errors import UnreadableImageError
from topk_registry.registry.signatures import parameters

PAGES = Path(__file__).parents[2] / "docs"
SMALL = {"size": 400, "superclasses": 4, "fine": 2}


@pytest.fixture
def folder(tmp_path):
    """Three classes with 4, 6 and 8 training images, one of them broken, and two of another format."""
    for c, count in {"ant": 4, "bee": 6, "cat": 8}.items():
        for split, number in (("train", count), ("val", 2)):
            place = tmp_path / split / c
            place.mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (4, 4), (i, i, i)).save(place / f"{i}.png")
    (tmp_path / "train/bee/1.png").write_text("no image")
    Image.new("RGB", (4, 4)).save(tmp_path / "train/ant/x.webp")
    return tmp_path


def test_built_in_data_is_itself(folder):
    data = open_dataset("topk/hierarchy", **SMALL)
    expected = Hierarchy(**SMALL)
    assert data.targets.tolist() == expected.targets
    assert (np.asarray(data[3][0]) == np.asarray(expected[3][0])).all()
    assert data.superclasses == expected.superclasses


def test_changes_are_for_training_only():
    changes = {"noise": 0.5, "noise_kind": "uniform", "long_tail": 4.0, "subset": 0.5, **SMALL}
    train, validation = (open_dataset("topk/hierarchy", split, **changes) for split in ("train", "validation"))
    assert len(validation) == 400
    assert (validation.targets == validation.true_targets).all()
    assert np.bincount(train.true_targets).tolist()[::7] == [25, 6]
    assert (train.targets != train.true_targets).mean() == pytest.approx(0.5, abs=0.01)
    assert len(train.notes) == 3
    assert open_dataset("topk/hierarchy", "train", training=False, **changes).notes == []


def test_a_held_out_part_is_that_of_the_unchanged_data():
    options = {"held_out": 0.25, "noise": 1.0, "long_tail": 10.0, **SMALL}
    train = open_dataset("topk/hierarchy", **options)
    held = open_dataset("topk/hierarchy", training=False, **options)
    assert not set(train.indices.tolist()) & set(held.indices.tolist())
    assert np.bincount(held.targets).tolist() == [12] * 8
    assert held.targets.tolist() == [i % 8 for i in held.indices]


def test_the_seed_of_a_data_set_is_that_of_its_changes():
    one, two, three = (
        open_dataset("topk/hierarchy", noise=0.5, **SMALL, **options).targets.tolist()
        for options in ({"seed": 1}, {"change_seed": 1}, {"seed": 2})
    )
    assert one == two != three


@pytest.mark.parametrize("name", ["", "topk/folder"])
def test_a_folder_of_images(folder, name, capsys):
    data = open_dataset(name, "train", folder, noise=0.5)
    assert data.classes == ["ant", "bee", "cat"]
    assert np.bincount(data.true_targets).tolist() == [4, 6, 8]
    assert "1 .webp" in data.notes[0]
    assert "9 of 18" in data.notes[1]
    assert data[5][1] == data.targets[6]  # its neighbour
    assert "bee/1.png" in capsys.readouterr().err
    with pytest.raises(UnreadableImageError, match=r"bee/1\.png"):
        data.dataset[5]
    held = open_dataset(name, "train", folder, training=False)
    assert [held[i][1] for i in range(4, 7)] == [1, -100, 1]
    assert len(open_dataset(name, "validation", folder)) == 6


def test_images_of_16_bits_and_files_that_vanish_are_unreadable(folder):
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(folder / "train/ant/0.png")
    with pytest.raises(UnreadableImageError, match=r"ant/0.png.*8 bits"):
        open_dataset("", "train", folder).dataset[0]
    data = open_dataset("", "train", folder).dataset
    (folder / "train/ant/1.png").unlink()
    with pytest.raises(UnreadableImageError, match=r"ant/1.png.*No such file"):
        data[1]


def test_a_data_set_of_timms_with_changes(folder):
    data = open_dataset("torch/image_folder", "train", folder, noise=0.5)
    assert data.classes == ["ant", "bee", "cat"]
    assert len(data.notes) == 1


def test_several_labels():
    data = open_dataset("topk/several", size=40, multilabel=True, subset=0.5)
    assert (len(data), data[0][1].shape) == (20, (20,))
    with pytest.raises(ValueError, match="--task multilabel"):
        open_dataset("topk/several", size=40)


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("topk/hierarchy", {"niose": 0.4}, TypeError, "did you mean 'noise'"),
        ("topk/hierarchy", {"noise": 1.4, **SMALL}, ValueError, r"\[0, 1\]"),
        ("topk/hierarchy", {"split": "tset"}, ValueError, "split must be one of"),
        ("topk/hirarchy", {}, LookupError, "the closest are hierarchy"),
        ("", {"niose": 0.4}, TypeError, "'niose'"),
        ("", {"root": "/no/such/place"}, OSError, "does not exist"),
        ("", {"multilabel": True}, ValueError, "one label per image"),
        ("", {"split": "test"}, ValueError, "no split 'test'; it has train, val$"),
        ("topk/hierarchy", {"root": "images"}, ValueError, "takes no directory, got 'images'"),
    ],
)
def test_what_cannot_be_opened_says_why(folder, name, options, error, words):
    with pytest.raises(error, match=words):
        open_dataset(name, **{"split": "train", "root": None if name else folder, **options})


def test_a_folder_of_classes_is_every_split_of_itself(folder):
    (folder / "train/bee").rename(folder / "train/train")
    assert open_dataset("", "test", folder / "train").classes == ["ant", "cat", "train"]


class Sound:
    """A data set of a plug-in."""

    classes = ("a", "b")
    transform = None
    sample = (Image.new("RGB", (4, 4)), 1)

    def __init__(self, split="train", noise=0.0):
        self.noise = noise

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.sample if self.transform is None else (self.transform(self.sample[0]), *self.sample[1:])


def test_a_plugin_gets_its_own_option_of_the_same_name(monkeypatch):
    monkeypatch.setattr(registry.datasets, "_registered", {})
    registry.datasets.register("sound")(Sound)
    data = open_dataset("topk/sound", noise=0.7)
    assert data.dataset.noise == 0.7
    assert data.notes == []


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ((Image.new("RGB", (4, 4)),), "samples (PIL image, label)"),
        ((np.zeros((4, 4)), 1), "PIL image"),
        ((Image.new("RGB", (4, 4)), 2), "from 0 to 1"),
        ((Image.new("RGB", (4, 4)), 0.5), "whole labels"),
        ((Image.new("RGB", (4, 4)), np.zeros(2)), "--task multilabel"),
    ],
)
def test_a_wrong_sample_of_a_plugin_is_described(sample, words):
    data = Sound()
    assert not first_problem(data)
    data.sample = sample
    assert words in first_problem(data)


def test_a_data_set_that_contradicts_itself_is_described(monkeypatch):
    data = Sound()
    data.targets = [1, 1]
    assert "2 targets and 3 samples" in first_problem(data)
    data.targets = [0, 1, 1]
    assert "targets[0]" in first_problem(data)
    data.targets = [1, 1, 1]
    assert not first_problem(data)
    monkeypatch.setattr(Sound, "__getitem__", lambda self, index: self.sample)
    assert "apply the attribute transform" in first_problem(data)
    assert data.transform is None


def test_options_of_data_sets_on_pages_exist():
    """Of commands that name a data set of ours, or none: then it is the built-in one."""
    lines = [line for page in PAGES.rglob("*.md") for line in page.read_text().splitlines() if "--dataset-opt" in line]
    found = [(line, re.findall(r"(\w+)=[\d.]+", line.partition("--dataset-opt")[2])) for line in lines]
    assert sum(map(len, dict(found).values())) >= 3
    for line, options in found:
        name = next(iter(re.findall(r"--dataset topk/(\w+)", line)), "hierarchy")
        own = {} if name == "folder" else parameters(registry.datasets.builder(name))[0]
        assert {*options} <= {*own, *CHANGES}, line
