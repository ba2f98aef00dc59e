"""Models are evaluated on the images that their training held out, never on its own images without being asked."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from topk_export.calibrate import open_folder
from topk_registry import registry
from topk_registry.cli.main import main
from topk_registry.data.held_out import images_to_use, record_of
from topk_registry.errors import FolderError
from topk_registry.train import TrainConfig, data

NAMES = ("blue", "green", "red")
HELD = {"data_dir": "somewhere/photos", "val_split": "0.25", "dataset_opt": {"change_seed": 3}}


@pytest.fixture
def photos(tmp_path):
    """A folder without splits: 12 images of each class."""
    for c, name in enumerate(NAMES):
        place = tmp_path / "photos" / name
        place.mkdir(parents=True)
        for i in range(12):
            Image.fromarray(np.full((8, 8, 3), 20 * c + i, np.uint8)).save(place / f"{i}.png")
    return tmp_path / "photos"


def held_out_by_training(photos):
    config = TrainConfig(**{**HELD, "data_dir": str(photos)})
    train = data.open_split(config, "train", training=True, held_out=0.25)
    held = data.open_split(config, "train", held_out=0.25)
    assert set(train.indices).isdisjoint(held.indices)
    return [held.dataset.reader.samples[i][0] for i in held.indices]


def test_a_run_trains_on_the_images_that_it_does_not_evaluate(photos):
    config = TrainConfig(data_dir=str(photos), val_split="0.25", dataset_opt={"noise": 1.0})
    found = data.open_data(config)
    used, held = ({int(i) for i in selection.indices} for selection in (found.train, found.validation))
    assert (len(used), len(held)) == (27, 9)
    assert used.isdisjoint(held)
    assert "held out 9 training images for evaluation" in found.notes
    assert any("27 of 27 training labels differ" in note for note in found.notes)  # options for training alone


def test_calibration_takes_the_files_that_training_held_out(photos):
    images, note = open_folder(photos, NAMES, trained_on=record_of(HELD), all_images=False)
    assert sorted(images.images) == sorted(held_out_by_training(photos))
    assert [NAMES[label] for label in images.labels] == [Path(path).parent.name for path in images.images]
    assert "the 25 % of" in note
    images, note = open_folder(photos, NAMES, trained_on=record_of(HELD), all_images=True)
    assert len(images.images) == 36
    assert "perhaps images of training" in note


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([{"val_split": "0.25"}, {"val_split": "0.5"}], "held out different images"),
        (
            [{"val_split": "0.25"}, {"val_split": "0.25", "dataset_opt": {"change_seed": 1}}],
            "held out different images",
        ),
        ([{"val_split": "0.25"}, {"val_split": "validation"}], "held out different images"),
        ([{"val_split": "", "data_dir": "/there/photos"}], "was trained on all images"),
    ],
)
def test_images_of_training_are_refused(photos, records, word):
    found = {f"model {i}": record_of(record) for i, record in enumerate(records)}
    with pytest.raises(FolderError, match=word):
        images_to_use(photos, found)
    assert images_to_use(photos, found, all_images=True)[:2] == (0.0, 0)


def test_the_training_split_itself_is_refused(photos):
    (photos.parent / "data" / "train").mkdir(parents=True)
    record = record_of({"data_dir": "data", "val_split": "validation"})
    with pytest.raises(FolderError, match="was trained on"):
        images_to_use(photos.parent / "data" / "train", {"model": record})
    assert "which has no splits" in images_to_use(photos, {"model": record})[2]
    assert "model records no images of training" in images_to_use(photos, {"model": None})[2]


class Constant:
    """A model in a file whose text is the fraction that its training held out; it predicts a constant."""

    class_names = NAMES

    def __init__(self, path, running):
        self.trained_on = record_of({**HELD, "val_split": path.read_text()})

    def run(self, images, keep):
        labels = [images.dataset[i][1] for i in range(len(images.dataset))]
        keep(np.tile(np.eye(3, dtype=np.float32)[0], (len(labels), 1)), np.array(labels))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(registry.model_files, "_registered", {})
    registry.model_files.register("constant")(Constant)
    for name, fraction in (("a", "0.25"), ("b", "0.25"), ("c", "0.5")):
        (tmp_path / f"{name}.constant").write_text(fraction)
    return {name: str(tmp_path / f"{name}.constant") for name in "abc"}


def test_validate_takes_the_images_that_training_held_out(photos, files, capsys):
    for flags, images, note in (([], 9, "the 25 % of"), (["--all-images"], 36, "perhaps images of training")):
        assert main(["validate", files["a"], str(photos), "-j", "0", "--device", "cpu", *flags]) == 0
        printed = capsys.readouterr()
        assert note in printed.err
        assert re.search(rf"^images +{images}$", printed.out, re.M)


def test_compare_takes_the_images_that_both_trainings_held_out(photos, files, capsys):
    words = ["--data-dir", str(photos), "--resamples", "20", "-j", "0", "--device", "cpu"]
    assert main(["compare", files["a"], files["b"], *words]) == 0
    printed = capsys.readouterr().out
    assert "the 25 % of" in printed
    assert "9 images of 3 classes" in printed
    assert main(["compare", files["a"], files["c"], *words]) == 2
    assert "held out different images" in capsys.readouterr().err
    assert main(["compare", files["a"], files["c"], *words, "--all-images"]) == 0
    assert "36 images of 3 classes" in capsys.readouterr().out


def test_a_checkpoint_and_an_export_have_one_record():
    record = record_of(TrainConfig(**HELD).to_dict())
    assert (record["folder"], record["val_split"], record["seed"]) == ("photos", "0.25", 3)
    assert record_of({"model": "resnet18"}) is None
