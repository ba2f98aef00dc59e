"""Scores of models over images: those of ``timm validate``, kept by content, resumed, in one order of classes."""

import argparse
import os
import re

import numpy as np
import pytest

from topk_registry.evaluation.cache import Entry, default_folder
from topk_registry.evaluation.flags import add_flags
from topk_registry.evaluation.images import Images
from topk_registry.evaluation.models import Checkpoint, Running, find_file, model_file
from topk_registry.evaluation.predictions import Predictions, in_order_of, names_of, predict, predictions_of
from topk_registry.registry.errors import UnknownPluginError
from topk_registry.train.config.validate_flags import create_parser
from topk_registry.train.errors import DataError, TrainError
from topk_registry.train.validate import validate

pytestmark = pytest.mark.slow


def flags(tmp_path, *argv):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(["--cache", str(tmp_path), "--workers", "0", *map(str, argv)])


def test_scores_have_the_metrics_of_validate(runs, tmp_path):
    (found,) = predictions_of([runs["ce"]], flags(tmp_path))
    args = create_parser().parse_args(["--checkpoint", str(runs["ce"] / "model_best.pth.tar"), "--workers", "0"])
    expected = validate(args)
    assert found.logits.shape == (90, 6)
    assert 100 * (found.logits.argmax(1) == found.labels).mean() == pytest.approx(expected["top1"], abs=1e-4)
    assert found.class_names == tuple(found.images.dataset.classes)
    assert np.array_equal(found.labels, found.images.dataset.targets)
    assert found.images.path(3) == "sample 3"
    assert found.images.picture(3).size == (32, 32)


def test_a_loss_with_its_own_probabilities_gives_scores_whose_softmax_they_are(tmp_path):
    from topk_registry.train import TrainConfig, Trainer

    data = {"superclasses": 2, "fine": 2, "size": 32, "eval_size": 16}
    config = TrainConfig(
        loss="log_taylor_softmax", epochs=1, dataset_opt=data, output=str(tmp_path), experiment="taylor"
    )
    Trainer(config, quiet=True).fit()
    (found,) = predictions_of([tmp_path / "taylor"], flags(tmp_path / "cache"))
    expected = validate(
        create_parser().parse_args(["--checkpoint", str(tmp_path / "taylor/last.pth.tar"), "--workers", "0"])
    )
    logits = found.logits.astype(float)
    own = logits[np.arange(16), found.labels] - np.log(np.exp(logits).sum(1))
    assert -own.mean() == pytest.approx(expected["nll"], abs=2e-4)


def test_an_exported_file_gives_the_scores_of_its_checkpoint(runs, exported, tmp_path):
    first, second = predictions_of([runs["ce"], exported], flags(tmp_path))
    assert np.abs(first.logits - second.logits).max() < 1e-4 * np.abs(first.logits).max()
    assert second.name == "model.onnx"


def test_a_folder_gives_the_scores_of_the_data_set_it_was_written_from(runs, exported, image_folder, tmp_path):
    (drawn,) = predictions_of([runs["ce"]], flags(tmp_path))
    found, again = predictions_of([runs["ce"], exported], flags(tmp_path, "--data-dir", image_folder))
    places = [int(re.search(r"(\d+)\.png$", found.images.path(i))[1]) for i in range(len(found.labels))]
    assert np.array_equal(found.labels, drawn.labels[places])
    assert np.abs(found.logits - drawn.logits[places]).max() < 1e-3
    assert np.abs(found.logits - again.logits).max() < 1e-3


class Counted:
    """A model file that counts its runs, and may be cut off."""

    def __init__(self, file, cut=None):
        self.file, self.cut, self.starts = file, cut, []
        self.fingerprint = file.fingerprint

    def open(self, images):
        opened, outer = self.file.open(images), self

        class Opened:
            class_names = opened.class_names

            def run(self, images, keep, *, start=0):
                outer.starts.append(start)
                rows = 0

                def counted(scores, labels):
                    nonlocal rows
                    keep(scores, labels)
                    rows += len(labels)
                    if outer.cut is not None and rows >= outer.cut:
                        raise KeyboardInterrupt

                opened.run(images, counted, start=start)

        return Opened()


def test_scores_are_kept_and_an_interrupted_pass_goes_on(runs, tmp_path):
    images = Images.open({"dataset": "topk/hierarchy", "dataset_opt": {**data_of(runs)}})
    checkpoint = Checkpoint(find_file(runs["ce"]), Running(batch_size=16, workers=0))
    whole = predict(checkpoint, images, name="whole")
    model = Counted(checkpoint, cut=32)
    with pytest.raises(KeyboardInterrupt):
        predict(model, images, name="a", folder=tmp_path)
    model.cut = None
    first = predict(model, images, name="a", folder=tmp_path)
    again = predict(model, images, name="a", folder=tmp_path)
    assert model.starts == [0, 32]
    assert np.array_equal(first.logits, again.logits)
    assert np.array_equal(first.labels, whole.labels)
    assert np.abs(first.logits - whole.logits).max() < 1e-4


def data_of(runs):
    from topk_registry.evaluation.models import data_settings

    return data_settings(runs["ce"])["dataset_opt"]


def test_other_weights_or_images_are_other_scores(runs, image_folder, tmp_path):
    a, b = (model_file(runs[loss]).fingerprint for loss in ("ce", "smooth_topk_svm"))
    assert a != b
    before = Images.open({"data_dir": str(image_folder)}).fingerprint
    assert Images.open({"data_dir": str(image_folder)}).fingerprint == before
    moved = tmp_path / "elsewhere"
    os.rename(image_folder, moved)
    try:
        assert Images.open({"data_dir": str(moved)}).fingerprint == before
        file = next(moved.glob("*/*.png"))
        times = file.stat()
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        assert Images.open({"data_dir": str(moved)}).fingerprint != before
    finally:
        os.rename(moved, image_folder)
    one, other = (Images.open({"dataset": "topk/hierarchy", "dataset_opt": {"size": 9, "seed": s}}) for s in (0, 1))
    assert one.fingerprint != other.fingerprint


def test_rows_of_an_entry_are_whole(tmp_path):
    entry = Entry(tmp_path / "entry")
    assert entry.class_names() is None
    assert entry.begin(["a", "b"]) == 0
    entry.put(0, np.ones((3, 2)), np.zeros(3, int))
    with entry.scores.open("ab") as file:
        file.write(b"torn")
    assert entry.rows() == 3
    assert not entry.complete
    assert entry.begin(["a", "b"]) == 3
    entry.put(3, np.full((1, 2), 2.0), np.ones(1, int))
    entry.finish()
    logits, labels = entry.read()
    assert entry.complete
    assert logits.tolist() == [[1, 1]] * 3 + [[2, 2]]
    assert labels.tolist() == [0, 0, 0, 1]
    assert entry.begin(["a", "b", "c"]) == 0, "other classes begin anew"


def test_models_with_other_orders_of_classes_are_put_in_one_order():
    images = None
    first = Predictions("a", np.eye(3), np.arange(3), ("x", "y", "z"), images)
    other = Predictions("b", np.eye(3)[:, [2, 0, 1]], np.array([1, 2, 0]), ("z", "x", "y"), images)
    found = in_order_of(first, other)
    assert np.array_equal(found.logits, first.logits)
    assert np.array_equal(found.labels, first.labels)


def test_what_cannot_be_compared_is_refused(runs, tmp_path):
    images = Images.open({"dataset": "topk/hierarchy"})
    first = Predictions("a", np.eye(3), np.arange(3), ("x", "y", "z"), images)
    with pytest.raises(DataError, match="a has 3 classes, b has 2"):
        in_order_of(first, Predictions("b", np.eye(2), np.arange(2), ("x", "y"), images))
    with pytest.raises(DataError, match="read other images or labels"):
        in_order_of(first, Predictions("b", np.eye(3), np.array([0, 1, 1]), ("x", "y", "z"), images))
    with pytest.raises(TrainError, match="there is no model file"):
        model_file(tmp_path / "none.onnx")
    with pytest.raises(TrainError, match="holds no checkpoint"):
        model_file(tmp_path)
    (tmp_path / "a.engine").touch()
    with pytest.raises(UnknownPluginError, match="no model file is called 'engine'"):
        model_file(tmp_path / "a.engine")
    with pytest.raises(DataError, match="name the images"):
        Images.open({})
    with pytest.raises(TrainError, match="named twice"):
        names_of([runs["ce"], runs["ce"]])


def test_names_are_as_short_as_they_can_be():
    assert names_of(["a/b/c.onnx", "a/b/d.onnx"]) == ["c.onnx", "d.onnx"]
    assert names_of(["a/b/c.onnx", "a/d/c.onnx"]) == ["b/c.onnx", "d/c.onnx"]


def test_the_cache_is_where_the_system_keeps_such(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "topk_registry" / "scores"
