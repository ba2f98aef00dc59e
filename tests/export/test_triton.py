"""A Triton repository: what its configuration says, and that nothing in it is ever overwritten."""

import re

import numpy as np
import onnxruntime
import pytest

from tests.export.colours import COLOURS, K
from topk_export import ExportError, Predictor
from topk_export.triton import write_repository


def content_of(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_configuration_describes_the_model(model_file, tmp_path):
    version = write_repository(model_file, tmp_path / "models", name="my colours", max_batch_size=16)
    assert version == tmp_path / "models" / "my_colours" / "1"
    config = (version.parent / "config.pbtxt").read_text()
    assert 'name: "my_colours"' in config
    assert 'backend: "onnxruntime"' in config
    assert "max_batch_size: 16" in config
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
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("pass")
    write_repository(model_file, tmp_path, name="colours")
    (tmp_path / "labelled").mkdir()
    for name in ("config.pbtxt", "labels.txt"):
        text = (tmp_path / "colours" / name).read_text()
        (tmp_path / "labelled" / name).write_text(text.replace("red", "rot"))
    before = content_of(tmp_path)
    other = export(12, k=3, temperature=0.5, class_names=tuple("abcdefghijkl"))
    for model, name, word in (
        (model_file, "mine", "no config.pbtxt"),
        (other, "colours", "other inputs or outputs"),
        (model_file, "labelled", "other class names"),
    ):
        with pytest.raises(ExportError, match=word):
            write_repository(model, tmp_path, name=name)
    assert content_of(tmp_path) == before


def test_bad_options(model_file, tmp_path):
    with pytest.raises(ValueError, match="max_batch_size"):
        write_repository(model_file, tmp_path, max_batch_size=0)
