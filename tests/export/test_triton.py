"""A Triton repository: what its configuration says, and that nothing in it is ever overwritten."""

import re
import shutil

import numpy as np
import onnxruntime
import pytest

from tests.export.colours import COLOURS, K
from topk_export import ExportError, Predictor
from topk_export.triton import write_repository


def content_of(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_configuration_describes_the_model(model_file, tmp_path):
    version = write_repository(shutil.copy(model_file, tmp_path / "my colours.onnx"), tmp_path / "models")
    assert version == tmp_path / "models" / "my_colours" / "1"
    config = (version.parent / "config.pbtxt").read_text()
    assert 'name: "my_colours"' in config
    assert 'backend: "onnxruntime"' in config
    assert "max_batch_size: 32" in config
    session = onnxruntime.InferenceSession(str(version / "model.onnx"), providers=["CPUExecutionProvider"])
    declared = re.findall(r'name: "(\w+)" data_type: (\w+) dims: \[ ([\d, ]+) \]', config)
    n = len(COLOURS)
    assert declared == [
        ("input", "TYPE_FP32", "3, 32, 40"),
        ("logits", "TYPE_FP32", f"{n}"),
        ("marginals", "TYPE_FP32", f"{n}"),
        ("probabilities", "TYPE_FP32", f"{n}"),
        ("indices", "TYPE_INT64", f"{K}"),
    ]
    assert [value.name for value in session.get_inputs()] == ["input"]  # Triton counts no optional inputs
    assert (version.parent / "labels.txt").read_text().split() == list(COLOURS)
    assert config.count("{") == config.count("}")
    assert config.count("[") == config.count("]")
    assert Predictor(version / "model.onnx", device="cpu").run(np.zeros((1, 3, 32, 40), np.float32))


def test_an_entry_gets_new_versions_and_keeps_all_files(model_file, tmp_path):
    entry = write_repository(model_file, tmp_path).parent
    (entry / "7").mkdir()
    (entry / "7" / "model.onnx").write_bytes(b"another")
    (entry / "notes.txt").write_text("mine")
    with (entry / "config.pbtxt").open("a") as config:
        config.write("instance_group [ { count: 2 } ]\n")
    before = content_of(tmp_path)
    assert write_repository(model_file, tmp_path) == entry / "8"
    after = content_of(tmp_path)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {f"{entry.name}/8/model.onnx"}


def test_entries_of_others_are_errors_and_untouched(model_file, export, tmp_path):
    folders = [tmp_path / name for name in ("mine", "others", "labelled")]
    (folders[0] / "colours").mkdir(parents=True)
    (folders[0] / "colours" / "model.py").write_text("pass")
    for folder in folders[1:]:
        write_repository(model_file, folder)
    labels = folders[2] / "colours" / "labels.txt"
    labels.write_text(labels.read_text().replace("red", "rot"))
    other = shutil.copy(export(12, k=3, temperature=0.5, class_names=tuple("abcdefghijkl")), tmp_path / "colours.onnx")
    before = content_of(tmp_path)
    words = ("no config.pbtxt", "other inputs or outputs", "other class names")
    for model, folder, word in zip((model_file, other, model_file), folders, words, strict=True):
        with pytest.raises(ExportError, match=word):
            write_repository(model, folder)
    assert content_of(tmp_path) == before
