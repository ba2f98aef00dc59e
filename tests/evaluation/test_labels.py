"""The command ``topk-registry labels``, from a folder of images to a run on the labels that a person corrected."""

import csv
import json
import shutil

import numpy as np
import pytest

from tests.train.conftest import stops_at, unclosed_files
from topk_registry.cli.main import main
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.evaluation.duplicates import find_duplicates
from topk_registry.evaluation.images import Images
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.setup.datasets import open_data

TRAIN = (
    *("--model", "topk_convnet", "--model-kwargs", "width=8", "-b", "16", "-j", "0", "--no-aug", "--device", "cpu"),
    *("--epochs", "8", "--opt", "adamw", "--lr", "0.01", "--warmup-epochs", "0", "--smoothing", "0"),
)
MOVED = {"two/6.png": "one/6.png", "three/15.png": "four/15.png"}  # where they belong: where they lie
LABELS = ("labels", "--device", "cpu", "-j", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Clear images of four classes: two in a wrong folder, one there twice under two labels, one broken."""
    root = tmp_path_factory.mktemp("data")
    names = ("one", "two", "three", "four")
    for split, size in (("train", 80), ("validation", 24)):
        drawn = Hierarchy(split, size=size, superclasses=4, fine=1, pixel_noise=0.5)
        for i in range(size):
            image, label = drawn[i]
            place = root / split / names[label]
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{i // 4}.png")
    for right, wrong in MOVED.items():
        shutil.move(root / "train" / right, root / "train" / wrong.replace("/", "/moved-"))
    shutil.copy(root / "train/one/3.png", root / "train/four/copy.png")
    (root / "train/two/0.png").write_bytes(b"no picture")
    return root


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs")
    words = ("train", "--data-dir", data, *TRAIN, "--output", output, "--experiment", "run", "--val-split", "")
    assert main([str(word) for word in words]) == 0
    return output / "run"


@unclosed_files
@pytest.mark.slow
def test_from_wrong_labels_to_a_run_without_them(run, data, tmp_path, capsys):
    files = {kind: tmp_path / f"labels.{kind}" for kind in ("csv", "json", "html")}
    flags = ("--folds", 3, "--cache", tmp_path / "cache", "--csv", files["csv"], "--json", files["json"], "--page",
             files["html"], "--fill", "relabel")  # fmt: skip
    command = [str(word) for word in (*LABELS, run, *flags)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "out of sample by 3 folds" in out
    assert "train/four/copy.png (four), train/one/3.png (one)" in out
    assert "unreadable  train/two/0.png" in out

    rows = list(csv.DictReader(files["csv"].open()))
    found = {row["image"]: row for row in rows if row["rank"]}
    for right, wrong in MOVED.items():
        row = found["train/" + wrong.replace("/", "/moved-")]
        assert (row["label"], row["suggested"]) == (wrong.split("/")[0], right.split("/")[0])
        assert row["action"] == "relabel"
        assert float(row["log_odds"]) < 0 < int(row["label_place"]) - 1
    assert [int(row["rank"]) for row in rows if row["rank"]] == list(range(1, len(found) + 1))
    twins = [row for row in rows if row["duplicates"]]
    assert {row["image"]: row["duplicates"] for row in twins} == {
        "train/four/copy.png": "train/one/3.png",
        "train/one/3.png": "train/four/copy.png",
    }
    assert float(found["train/four/copy.png"]["log_odds"]) < 0
    held = [(run / "folds-3" / f"fold-{fold}" / "held_out.csv").read_text() for fold in (1, 2, 3)]
    assert [("four/copy.png" in text, "one/3.png" in text) for text in held].count((True, True)) == 1  # no copy is seen
    facts = json.loads(files["json"].read_text())
    assert facts["suspicious"] == len(found) == len(facts["labels"])
    assert facts["duplicates"]["unreadable"] == ["train/two/0.png"]
    assert [group["same_pixels"] for group in facts["duplicates"]["groups"]] == [True]
    assert "train/two/0.png" not in found  # the model saw its neighbour
    page = files["html"].read_text()
    assert "data:image/jpeg" in page
    assert "moved-6.png" in page
    assert "://" not in page

    words = (*TRAIN, "--data-dir", data, "--relabel", files["csv"])
    settings = parse_args([str(word) for word in words])
    corrected = open_data(settings)
    assert f"relabelled {len(found)} of 81 training images by {files['csv']}" in corrected.notes[-1]
    names = [path for path, _ in corrected.train.dataset.reader.samples]
    place = next(i for i, path in enumerate(names) if path.endswith("one/moved-6.png"))
    assert corrected.class_names[corrected.train.targets[place]] == "two"
    assert main(command) == 0  # from what was kept


@unclosed_files
@pytest.mark.slow
def test_a_split_that_was_trained_on_is_said(run, tmp_path, capsys):
    command = [*LABELS, str(run), "--no-cache", "--no-duplicates", "--k", "2", "--fit-temperature"]
    assert main([*command, "--split", "train", "--top", "1"]) == 0
    said = capsys.readouterr()
    assert "split 'train' of image folder" in said.err
    assert "is what the model was trained on" in said.err
    assert "not among the 2 best classes" in said.out
    assert "duplicates" not in said.out
    assert main([*command, "--split", "validation"]) == 0
    said = capsys.readouterr()
    assert "trained on" not in said.err
    assert "24 of split 'validation'" in said.out


@unclosed_files
@pytest.mark.slow
def test_an_exported_file_judges_a_folder(exported, image_folder, tmp_path, capsys):
    wrong = tmp_path / "images"
    shutil.copytree(image_folder, wrong)
    first, second = sorted(path for path in wrong.iterdir() if path.is_dir())[:2]
    moved = sorted(first.iterdir())[0]
    shutil.move(moved, second / "moved.png")
    flags = ("--data-dir", wrong, "--split", "validation", "--no-cache", "--csv", tmp_path / "labels.csv")
    assert main([str(word) for word in ("labels", exported, "--device", "cpu", *flags)]) == 0
    said = capsys.readouterr()
    assert "90 of split 'validation'" in said.out
    assert "trained on" not in said.err
    assert (tmp_path / "labels.csv").read_text().startswith("rank,image,label,suggested,log_odds,label_place,")


@unclosed_files
@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(run, tmp_path, monkeypatch, capsys):
    command = [*LABELS, str(run), "--folds", "2", "--folds-dir", str(tmp_path), "--no-cache", "--no-duplicates"]
    with monkeypatch.context() as patch:
        stops_at(patch, 3)
        assert main(command) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err
    assert (tmp_path / "fold-1" / "last.pth.tar").is_file()


@unclosed_files
def test_pictures_are_read_once(data, tmp_path, monkeypatch):
    images = Images.open({"data_dir": str(data), "val_split": "validation"})
    labels = np.zeros(24, np.int64)
    first = find_duplicates(images, labels, tmp_path)
    (file,) = tmp_path.glob("*.u8")
    assert file.stat().st_size == 24 * 49
    file.write_bytes(file.read_bytes()[: 20 * 49 + 7])  # an interrupt, in the middle of a row
    read = []
    picture = Images.picture
    monkeypatch.setattr(Images, "picture", lambda self, index: read.append(index) or picture(self, index))
    assert find_duplicates(images, labels, tmp_path) == first
    assert sorted(read) == [20, 21, 22, 23]
    assert find_duplicates(images, labels).unreadable == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nothing.pth"], "there is no model file nothing.pth"),
        (["nothing.pth", "--folds", "3"], "there is no model file nothing.pth"),
        (["x", "--folds-dir", "y"], "--folds-dir needs --folds"),
        (["x", "--fill", "exclude"], "--fill needs --csv"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags, message, capsys):
    try:
        status = main(["labels", *flags])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err
