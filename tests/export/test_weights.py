"""External weights: found, complete, of this model, inside the folder, and moved together with the model."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from topk_export import ModelFileError, Predictor, graph
from topk_export.staging import move_into_place
from topk_export.verify import verify_file

NAME = "model.onnx.data"


@pytest.fixture(scope="module")
def model(model_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("external") / "model.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "LIMIT", 0)
        patch.setattr(graph, "SMALL", 100)
        graph.save(graph.load(model_file), path)
    return path


@pytest.fixture
def copied(model, tmp_path):
    return copy_to(tmp_path, model)


def copy_to(folder, model):
    shutil.copy(model.with_name(NAME), folder)
    return Path(shutil.copy(model, folder))


def outputs(path) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((3, 3, 32, 40)).astype(np.float32)
    return Predictor(path, device="cpu", threads=1).run(x)


def test_the_weights_are_beside_the_model_and_nothing_else_changes(model, tmp_path):
    inside = tmp_path / "inside.onnx"
    onnx.save(onnx.load(str(model)), str(inside))
    for name, value in outputs(inside).items():
        np.testing.assert_array_equal(outputs(model)[name], value)
    proto = onnx.load(str(model), load_external_data=False)
    ends = []
    for tensor in proto.graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            assert info.offset % graph.ALIGNMENT == 0
            ends.append(info.offset + info.length)
    assert max(ends) == model.with_name(NAME).stat().st_size


def test_missing_short_and_foreign_weights(copied):
    weights = copied.with_name(NAME)
    content = weights.read_bytes()
    changed = bytearray(content)
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(ModelFileError, match="does not belong to"):
        Predictor(copied, device="cpu")
    failed = [check["name"] for check in verify_file(copied)["checks"] if not check["passed"]]
    assert "external weights belong to this model" in failed
    os.truncate(weights, len(content) - 1)
    with pytest.raises(ModelFileError, match="onnxruntime can load"):
        Predictor(copied)
    weights.unlink()
    for open_it in (Predictor, verify_file):
        with pytest.raises(ModelFileError, match=NAME):
            open_it(copied)


@pytest.mark.parametrize("name", ["../model.onnx.data", "/etc/passwd"])
def test_weights_of_other_folders_are_not_read(copied, name):
    shutil.copy(copied.with_name(NAME), copied.parent.parent)
    proto = onnx.load(str(copied), load_external_data=False)
    for tensor in filter(uses_external_data, proto.graph.initializer):
        tensor.external_data[0].value = name
    onnx.save(proto, str(copied))
    with pytest.raises(ModelFileError, match=r"escapes model directory|Absolute path"):
        Predictor(copied)


def test_saving_again_copies_the_weights(copied, model, tmp_path):
    proto = graph.load(copied)
    target = tmp_path / "again" / "other.onnx"
    target.parent.mkdir()
    graph.save(proto, target, source=copied.parent)
    assert target.with_name("other.onnx.data").is_file()
    np.testing.assert_array_equal(outputs(target)["logits"], outputs(model)["logits"])


def test_an_interrupted_move_leaves_no_model_with_foreign_weights(copied, model, tmp_path, monkeypatch):
    staged = tmp_path / "staged"
    staged.mkdir()
    new = copy_to(staged, model)
    replace, moved = os.replace, []

    def failing(source, target):
        if moved:
            raise OSError(28, "No space left on device")
        moved.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space"):
        move_into_place(new, copied)
    assert not copied.exists()
    monkeypatch.undo()
    shutil.copyfile(model, copied)
    assert outputs(copied)
