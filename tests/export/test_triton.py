"""A Triton repository: what its configuration says, and that nothing in it is ever overwritten."""

import re
import shutil

import numpy as np
import onnxruntime
import pytest

from tests.export.colours import COLOURS, K
from tests.system_calls import Calls, state_of
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


def test_an_entry_that_exists_is_an_error_and_untouched(model_file, tmp_path):
    entry = write_repository(model_file, tmp_path).parent
    (entry / "notes.txt").write_text("mine")
    before = content_of(tmp_path)
    with pytest.raises(ExportError, match=r"exists: .*/2/model\.onnx"):
        write_repository(model_file, tmp_path)
    assert content_of(tmp_path) == before


def test_an_entry_is_on_the_disk_before_it_has_its_name(model_file, tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    version = write_repository(model_file, tmp_path)
    (at,) = calls.moves_to(str(version.parent))
    calls.check_folder_synced(at)
    staged = calls[at].path
    synced = {call.path.removeprefix(staged): call.state for call in calls[:at] if call.name == "fsync"}
    written = (version.parent, *version.parent.rglob("*"))
    for path in written:
        assert synced[str(path).removeprefix(str(version.parent))] == state_of(str(path)), path
