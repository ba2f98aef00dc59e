"""Folders as classes: which files are images, which class each folder stands for, and labels that look wrong."""

import random

import numpy as np
import pytest
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key as timms_key

from topk_registry.folders.agreement import agreement
from topk_registry.folders.classes import class_map
from topk_registry.folders.errors import FolderError, WrongLabelsError
from topk_registry.folders.images import images_below, natural_key, read_folders, split_folder

SUFFIXES = {".png", ".jpg"}


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


def test_names_with_a_dot_in_front_are_no_images_and_no_classes(make):
    root = make("cat/1.png", "cat/._1.png", ".ipynb_checkpoints/1.png", "cat/.cache/2.png", "._x.png")
    assert read_folders(root, SUFFIXES).names == ["cat"]
    assert [path for path, _ in read_folders(root, SUFFIXES).images] == images_below(root, SUFFIXES)
    assert len(images_below(root, SUFFIXES)) == 1


def test_a_class_without_images_is_named(make):
    assert read_folders(make("cat/1.png", "dog/", "owl/1.webp", "owl/readme.txt"), SUFFIXES).empty == ["dog", "owl"]


def test_two_classes_of_one_name_are_refused(make):
    root = make("dogs/other/1.png", "cats/other/1.png", "cats/tabby/1.png")
    with pytest.raises(FolderError, match=r"two class folders are called 'other', .*cats/other and .*dogs/other"):
        read_folders(root, SUFFIXES)
    assert read_folders(root, SUFFIXES, joined=True).names == ["other", "tabby"]


def test_images_in_no_class_folder_are_refused(make):
    with pytest.raises(FolderError, match=r"holds 1 image in no class folder, such as stray.png"):
        read_folders(make("cat/1.png", "stray.png"), SUFFIXES)


def test_a_flat_folder_has_one_class_where_labels_do_not_matter(make):
    assert read_folders(make("1.png", "2.png"), SUFFIXES, flat=True).names == [""]


def test_no_images(make):
    with pytest.raises(FolderError, match=r"holds no images \(.jpg, .png\)"):
        read_folders(make("cat/"), SUFFIXES)


def test_a_split_has_synonyms(make):
    root = make("val/", "train/")
    assert split_folder(root, "validation") == root / "val"
    assert split_folder(root, "test") is None


CLASSES = ["c0", "c1", "c2", "c10", "c11"]


def test_folders_stand_for_the_classes_of_their_names():
    assert class_map(["c10", "c2"], CLASSES).numbers == {"c10": 3, "c2": 2}
    assert class_map(["c10", "c2"], CLASSES).missing == ["c0", "c1", "c11"]


def test_without_a_name_of_a_class_folders_are_in_natural_order():
    found = class_map(["f0", "f1", "f10", "f11", "f2"], CLASSES)
    assert found.numbers == {"f0": 0, "f1": 1, "f2": 2, "f10": 3, "f11": 4}
    assert not found.by_name
    assert "f2 = c2, f10 = c10" in found.told


@pytest.mark.parametrize(
    ("folders", "by_order", "message"),
    [
        (["c0", "c1", "c2", "c10", "cx"], True, "has the classes 'cx', and the model has 5 classes: c0"),
        (["c0", "cx"], True, "--ignore-unknown-classes leaves the others out"),
        (["f0", "f1"], True, "or as many classes in the same order"),
        (["f0", "f1", "f2", "f3", "f4"], False, "expected these names$"),
    ],
)
def test_a_part_by_name_and_a_part_by_order_is_refused(folders, by_order, message):
    with pytest.raises(FolderError, match=message):
        class_map(folders, CLASSES, by_order=by_order)


def test_unknown_folders_are_left_out_when_asked():
    found = class_map(["c0", "cx"], CLASSES, ignore_unknown=True)
    assert (found.numbers, found.left_out) == ({"c0": 0}, ["cx"])
    with pytest.raises(FolderError):
        class_map(["cx", "cy"], CLASSES, ignore_unknown=True)


def test_classes_of_one_name_cannot_be_told():
    with pytest.raises(FolderError, match="several classes called 'crane'"):
        class_map(["crane", "owl"], ["crane", "owl", "crane"])
    assert class_map(["owl"], ["crane", "owl", "crane"]).numbers == {"owl": 1}


def test_twenty_thousand_classes_are_looked_up_once_each():
    hashed = []

    class Name(str):
        def __hash__(self):
            hashed.append(self)
            return super().__hash__()

    names = [Name(f"c{i}") for i in range(20_000)]
    assert class_map(names, names).missing == []
    assert len(hashed) < 12 * len(names)


def test_numbers_are_no_names():
    """A file without class names has numbers from 0; folders are often counted from 1."""
    assert class_map(["1", "2", "3"], ["0", "1", "2"]).numbers == {"1": 0, "2": 1, "3": 2}
    assert class_map(["2", "0"], ["0", "1", "2"]).numbers == {"2": 2, "0": 0}


def labelled(n, each, accuracy, order=None):
    """Labels, and predictions that are right with this share, before the order of the classes is mixed up."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(n), each)
    best = np.where(rng.random(len(labels)) < accuracy, labels, rng.integers(0, n, len(labels)))
    return best, labels if order is None else np.asarray(order)[labels]


@pytest.mark.parametrize("n", [12, 100, 1000])
def test_plain_order_in_the_place_of_natural_order_is_noticed(n):
    names = [f"c{i}" for i in range(n)]
    plain = [sorted(names).index(name) for name in names]
    assert not agreement(*labelled(n, 20, 0.7), names).suspicion
    found = agreement(*labelled(n, 20, 0.7, plain), names)
    assert "mostly taken for" in found.suspicion
    with pytest.raises(WrongLabelsError, match="--force goes on"):
        found.check(force=False)
    found.check(force=True)


def test_a_weak_model_is_let_through():
    for n, accuracy in ((2, 0.4), (12, 0.15), (1000, 0.05)):  # beside these, chance hits too
        assert not agreement(*labelled(n, 50, accuracy), list(map(str, range(n)))).suspicion


def test_chance_is_suspicious():
    found = agreement(*labelled(12, 30, 0.0), list(map(str, range(12))))
    assert found.suspicion.startswith("top-1 accuracy is ")
    assert "where chance has 8.3%" in found.suspicion
