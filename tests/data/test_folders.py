"""Folders as classes: which files are images, which class each folder stands for, and labels that look wrong."""

import os
import random

import numpy as np
import pytest
from PIL import Image
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key as timms_key

from topk_registry.data.agreement import agreement
from topk_registry.data.folders import class_map, images_below, natural_key, read_folders, split_folder
from topk_registry.errors import FolderError, WrongLabelsError

SUFFIXES = {".png", ".jpg"}
CLASSES = ["c0", "c1", "c2", "c10", "c11"]


@pytest.fixture
def make(tmp_path):
    """``make("a/0.png", "b/")``: empty files and folders below a root."""

    def made(*paths):
        for path in paths:
            place = tmp_path / path
            (place if path.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                place.touch()
        return tmp_path

    return made


def test_folders_and_images_are_those_of_timm(make):
    root = make(
        *(f"deep/c{c}/{i}.png" for c in (10, 2, 1) for i in (10, 9)), "C3/x.JPG", "c3a/1.png", "c2/", "c1/a.txt"
    )
    expected, numbers = find_images_and_targets(str(root), types=SUFFIXES)
    found = read_folders(root, SUFFIXES)
    assert {name: i for i, name in enumerate(found.names)} == numbers
    assert [(path, numbers[name]) for path, name in found.images] == expected


def test_order_does_not_depend_on_chance():
    """timm leaves names that differ by case alone in the order of a set, which is another in each process."""
    names = ["A", "a", "b1", "b01", "B1", "c10", "c2"]
    orders = {tuple(sorted(random.Random(seed).sample(names, len(names)), key=natural_key)) for seed in range(20)}
    assert orders == {("A", "a", "B1", "b01", "b1", "c2", "c10")}
    assert [timms_key(name) for name in sorted(names, key=natural_key)] == sorted(map(timms_key, names))


def test_hidden_files_and_folders_are_skipped(make):
    root = make("cat/1.png", "cat/._1.png", ".ipynb_checkpoints/1.png", "cat/.cache/2.png", "._x.png")
    assert read_folders(root, SUFFIXES).names == ["cat"]
    assert [path for path, _ in read_folders(root, SUFFIXES).images] == images_below(root, SUFFIXES)
    assert len(images_below(root, SUFFIXES)) == 1


def test_files_of_other_formats_and_empty_folders_are_counted(make):
    found = read_folders(make("cat/1.png", "cat/2.webp", "dog/", "owl/1.webp", "owl/2.TIF", "owl/a.txt"), SUFFIXES)
    formats, empty = found.notes
    assert "2 .webp, 1 .tif" in formats
    assert ".txt" not in formats
    assert empty.endswith("dog, owl")


def test_folders_that_cannot_be_read_are_counted(make, monkeypatch):
    def opened(folder, scandir=os.scandir):
        if str(folder).endswith("dog"):
            raise PermissionError(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", opened)
    assert "without images: dog" in "".join(read_folders(make("cat/1.png", "dog/1.png"), SUFFIXES).notes)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["dogs/other/1.png", "cats/other/1.png"], "two class folders are named 'other'"),
        (["cat/1.png", "stray.png"], "outside of class folders, such as stray.png"),
        (["cat/"], r"no images \(.jpg, .png\)"),
        (["cat/1.webp", "cat/2.webp"], "2 .webp.*; .*no images"),  # what was skipped comes first
    ],
)
def test_folders_that_are_no_classes_are_an_error(make, paths, words):
    with pytest.raises(FolderError, match=words):
        read_folders(make(*paths), SUFFIXES)


def test_a_split_has_synonyms(make):
    root = make("val/", "train/")
    assert split_folder(root, "validation") == root / "val"
    assert split_folder(root, "test") is None


def test_folders_stand_for_the_classes_of_their_names():
    numbers, summary = class_map(["c10", "c2"], CLASSES)
    assert numbers == {"c10": 3, "c2": 2}
    assert summary == "2 classes by name; without images: c0, c1, c11"


def test_if_no_name_matches_folders_are_taken_in_natural_order():
    numbers, summary = class_map(["f0", "f1", "f10", "f11", "f2"], CLASSES)
    assert numbers == {"f0": 0, "f1": 1, "f2": 2, "f10": 3, "f11": 4}
    assert "by order" in summary
    assert "f2 = c2, f10 = c10" in summary
    assert class_map(["1", "2", "3"], ["0", "1", "2"])[0] == {"1": 0, "2": 1, "3": 2}  # no names, but numbers
    assert class_map(["2", "0"], ["0", "1", "2"])[0] == {"2": 2, "0": 0}


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["c0", "c1", "c2", "c10", "cx"], "'cx', and the model has 5 classes"),
        (["c0", "cx"], "--ignore-unknown-classes"),
        (["f0", "f1"], "in the same order"),
    ],
)
def test_a_mixture_of_names_and_order_is_an_error(folders, words):
    with pytest.raises(FolderError, match=words):
        class_map(folders, CLASSES)


def test_unknown_folders_are_skipped_on_request():
    numbers, summary = class_map(["c0", "cx"], CLASSES, ignore_unknown=True)
    assert numbers == {"c0": 0}
    assert "skipped, because the model has no such class: cx" in summary
    with pytest.raises(FolderError):
        class_map(["cx", "cy"], CLASSES, ignore_unknown=True)


def test_two_classes_of_one_name_are_an_error():
    with pytest.raises(FolderError, match="several classes named 'crane'"):
        class_map(["crane", "owl"], ["crane", "owl", "crane"])
    assert class_map(["owl"], ["crane", "owl", "crane"])[0] == {"owl": 1}


def labelled(n, each, accuracy, order=None):
    """Labels, and predictions that are right with this share, before the order of the classes is mixed up."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(n), each)
    best = np.where(rng.random(len(labels)) < accuracy, labels, rng.integers(0, n, len(labels)))
    return best, labels if order is None else np.asarray(order)[labels]


@pytest.mark.parametrize("n", [12, 100])
def test_plain_order_instead_of_natural_order_is_found(n):
    names = [f"c{i}" for i in range(n)]
    plain = [sorted(names).index(name) for name in names]
    assert not agreement(*labelled(n, 20, 0.7), names).problem
    found = agreement(*labelled(n, 20, 0.7, plain), names)
    with pytest.raises(WrongLabelsError, match="--force"):
        found.check()
    found.check(force=True)


def test_two_swapped_folders_of_twenty_are_named():
    order = [1, 0, *range(2, 20)]
    found = agreement(*labelled(20, 20, 0.8, order), [f"c{i}" for i in range(20)])
    assert sorted(found.confused) == [("c0", "c1"), ("c1", "c0")]
    assert "'c0' as 'c1'" in found.problem


@pytest.mark.parametrize("n", [10, 100])
def test_a_class_that_the_model_does_not_know_is_no_swapped_folder(n):
    best, labels = labelled(n, 20, 0.9)
    best[labels < n // 10] = n - 1
    found = agreement(best, labels, [f"c{i}" for i in range(n)])
    assert found.confused == [(f"c{i}", f"c{n - 1}") for i in range(n // 10)]
    assert not found.problem


@pytest.mark.parametrize(("n", "accuracy"), [(2, 0.4), (12, 0.15), (1000, 0.05)])
def test_a_weak_model_is_accepted(n, accuracy):  # chance adds to these
    assert not agreement(*labelled(n, 50, accuracy), list(map(str, range(n)))).problem


def test_chance_is_a_problem():
    assert "random guesses have 8.3%" in agreement(*labelled(12, 30, 0.0), list(map(str, range(12)))).problem


def test_a_named_pipe_is_no_image(tmp_path):
    place = tmp_path / "cat"
    place.mkdir()
    Image.new("RGB", (4, 4)).save(place / "a.png")
    os.mkfifo(place / "x.png")
    (place / "gone.png").symlink_to(place / "nothing")
    names = [os.path.basename(path) for path, _ in read_folders(tmp_path).images]
    assert names == ["a.png", "gone.png"]  # a dangling link is an error that names the file
    assert [os.path.basename(path) for path in images_below(tmp_path)] == names
