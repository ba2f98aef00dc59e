"""The folder of ``predict --output``: what belongs to one run, and the order of writes."""

import inspect
import os
import shutil

import numpy as np
import pytest

from tests.deploy.files import COLORS, NAMES, as_image
from tests.system_calls import Calls
from topk_export import Predictor
from topk_export.predict import RUN, OutputError, predict_to_parquet
from topk_export.staging import move_into_place


@pytest.fixture
def images(tmp_path):
    paths = []
    for i, color in enumerate(list(COLORS.values())[:4]):
        paths.append(str(tmp_path / f"{i}.png"))
        as_image(color).save(paths[-1])
    return paths


@pytest.fixture
def model(set_file, tmp_path):
    """A copy of a calibrated file."""
    return shutil.copy(set_file, tmp_path / "model.onnx")


# an argument of a run, another value, and the name in the error message; "" if the result stays the same
CHANGES = {
    "images": (lambda images: images[:3], "count, images"),
    "order of images": (lambda images: images[::-1], "images"),
    "shard_size": (3, "shard_size"),
    "alpha": (0.2, "options"),
    "alpha of the default": (0.1, "options"),
    "max_set": (2, "options"),
    "allowed": (list(NAMES[:2]), "options"),
    "batch_size": (1, ""),
    "progress": (lambda rows, done: rows, ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_belongs_to_one_run(model, images, tmp_path, change):
    predictor, out = Predictor(model, device="cpu", threads=1), tmp_path / "out"
    options = {"shard_size": 2, "max_set": 5}
    predict_to_parquet(predictor, images, out, **options)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    other, word = CHANGES[change]
    if "images" in change:
        images = other(images)
    else:
        options[change.split()[0]] = other
    if word:
        with pytest.raises(OutputError, match=f"another run: {word} differ"):
            predict_to_parquet(predictor, images, out, **options)
    else:
        assert predict_to_parquet(predictor, images, out, **options) == (4, 0)
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}


def test_a_class_list_may_be_a_mask(model, images, tmp_path):
    predictor, out = Predictor(model, device="cpu", threads=1), tmp_path / "out"
    mask = np.arange(len(NAMES)) < 2
    for _ in range(2):
        assert predict_to_parquet(predictor, images, out, allowed=mask) == (4, 0)
    with pytest.raises(OutputError, match="options differ"):
        predict_to_parquet(predictor, images, out, allowed=~mask)


def test_another_model_of_the_same_name_is_another_run(model, images, tmp_path):
    out = tmp_path / "out"
    predict_to_parquet(Predictor(model, device="cpu", threads=1), images, out)
    with open(model, "ab") as file:
        file.write(b"\x72\x00")  # metadata without a key
    with pytest.raises(OutputError, match="model differ"):
        predict_to_parquet(Predictor(model, device="cpu", threads=1), images, out)


def test_every_option_of_a_prediction_is_flipped():
    """A new option belongs into the table: does it change the result?"""
    known = {name.split()[0] for name in CHANGES} - {"images", "order", "shard_size", "progress"}
    assert set(inspect.signature(Predictor.stream).parameters) == known | {"self", "images", "on_error"}


def test_a_missing_shard_is_made_again_and_an_unfinished_one_is_not_taken(model, images, tmp_path):
    predictor, out = Predictor(model, device="cpu", threads=1), tmp_path / "out"
    predict_to_parquet(predictor, images, out, shard_size=2)
    whole = (out / "part-000001.parquet").read_bytes()
    (out / "part-000001.parquet").unlink()
    (out / ".part-000001.parquet.123").write_bytes(whole[:10])
    first = (out / "part-000000.parquet").stat().st_mtime_ns
    assert predict_to_parquet(predictor, images, out, shard_size=2) == (4, 0)
    assert (out / "part-000001.parquet").read_bytes() == whole
    assert (out / "part-000000.parquet").stat().st_mtime_ns == first


def test_a_shard_reaches_the_disk_before_it_gets_its_name(model, images, tmp_path, monkeypatch):
    predictor, out = Predictor(model, device="cpu", threads=1), tmp_path / "out"
    calls = Calls(monkeypatch)
    predict_to_parquet(predictor, images, out, shard_size=3)
    moves = calls.moves_to("*")
    places = [os.path.basename(calls[at].target) for at in moves]
    assert places == [RUN, "part-000000.parquet", "part-000001.parquet"]
    for at in moves:
        calls.check_synced(at)
        calls.check_folder_synced(at)
        assert os.path.basename(calls[at].path).startswith(".")  # programs that read the folder skip it
    assert {path.name for path in out.iterdir()} == set(places)


def test_a_failed_write_leaves_no_half_of_a_file(model, images, tmp_path, monkeypatch):
    predictor, out = Predictor(model, device="cpu", threads=1), tmp_path / "out"

    def fail(handle):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        predict_to_parquet(predictor, images, out)
    assert list(out.iterdir()) == []


def test_a_model_comes_after_its_other_files(model, tmp_path, monkeypatch):
    staged, place = tmp_path / "staged", tmp_path / "place"
    staged.mkdir()
    place.mkdir()
    new = shutil.copy(model, staged / "model.onnx")
    labels = staged / "model.labels.txt"
    labels.write_text("a")
    calls = Calls(monkeypatch)
    move_into_place(new, place / "model.onnx")
    targets = [os.path.basename(call.target) for call in calls if call.name == "replace"]
    assert targets == ["model.labels.txt", "model.onnx"]
    for at in calls.moves_to("*"):
        calls.check_synced(at)
        calls.check_folder_synced(at)
