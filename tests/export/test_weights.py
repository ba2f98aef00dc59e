"""External weights: found, complete, of this model, inside the folder, and moved together with the model."""

import os
import shutil

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from topk_export import ModelFileError, Predictor, graph
from topk_export.runtime.weights import copy_model, external_sizes, files_of
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
    return copy_model(model, tmp_path / "model.onnx")[-1]


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
    assert external_sizes(model) == {NAME: max(ends)} == {NAME: model.with_name(NAME).stat().st_size}
    assert external_sizes(inside) == {}


def test_a_broken_file_names_no_weights(model, tmp_path):
    content, path = model.read_bytes(), tmp_path / "broken.onnx"
    rng = np.random.default_rng(0)
    for end in range(0, len(content), 997):
        path.write_bytes(content[:end] + rng.bytes(end % 50))
        external_sizes(path)
    path.write_bytes(b"")
    with pytest.raises(ModelFileError, match="onnxruntime can load"):
        Predictor(path)


def test_missing_short_and_foreign_weights(copied):
    weights = copied.with_name(NAME)
    content = weights.read_bytes()
    os.truncate(weights, len(content) - 1)
    with pytest.raises(ModelFileError, match="copy it again"):
        Predictor(copied)
    changed = bytearray(content)
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(ModelFileError, match="does not belong to"):
        Predictor(copied, device="cpu")
    failed = [check["name"] for check in verify_file(copied)["checks"] if not check["passed"]]
    assert "external weights belong to this model" in failed
    weights.unlink()
    for open_it in (Predictor, verify_file):
        with pytest.raises(ModelFileError, match="does not exist: move both together"):
            open_it(copied)


@pytest.mark.parametrize("name", ["../weights", "/etc/passwd", "a/b", "..\\weights", "C:weights"])
def test_weights_of_other_folders_are_not_read(copied, name):
    proto = onnx.load(str(copied), load_external_data=False)
    for tensor in filter(uses_external_data, proto.graph.initializer):
        tensor.external_data[0].value = name
    onnx.save(proto, str(copied))
    with pytest.raises(ModelFileError, match="outside of its folder"):
        files_of(copied)


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
    new = copy_model(model, staged / "model.onnx")[-1]
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
