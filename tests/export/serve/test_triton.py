"""A Triton repository: its layout, and its configuration read with Triton's own schema."""

import importlib.util
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from google.protobuf import text_format

from tests.export.colours import COLOURS, K
from topk_export.commands import serve
from topk_export.errors import ModelFileError
from topk_export.serve.triton import write_repository


def schema() -> Any:
    """Triton's ``ModelConfig``, from the client's generated module alone: the package around it needs grpc."""
    path = distribution("tritonclient").locate_file("tritonclient/grpc/model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", str(path))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def triton() -> Any:
    return schema()


def read(triton: Any, entry: Path) -> Any:
    return text_format.Parse((entry / "config.pbtxt").read_text(encoding="utf-8"), triton.ModelConfig())


def shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tuple(tensor.dims) for tensor in tensors}


def test_the_repository_of_a_model(triton, model_file, tmp_path):
    entry = write_repository(model_file, tmp_path / "models", max_batch_size=8)
    assert entry == tmp_path / "models" / "colours"
    files = sorted(str(path.relative_to(entry)) for path in entry.rglob("*") if path.is_file())
    assert files == ["1/model.onnx", "config.pbtxt", "labels.txt"]
    assert sorted(path.name for path in entry.parent.iterdir()) == ["colours"]
    assert (entry / "1" / "model.onnx").read_bytes() == model_file.read_bytes()
    assert (entry / "labels.txt").read_text(encoding="utf-8").splitlines() == list(COLOURS)

    config = read(triton, entry)
    assert (config.name, config.backend, config.max_batch_size) == ("colours", "onnxruntime", 8)
    assert shapes(config.input) == {"input": (3, 32, 40)}
    assert shapes(config.output) == {"logits": (12,), "marginals": (12,), "indices": (K,)}
    types = {tensor.name: tensor.data_type for tensor in (*config.input, *config.output)}
    fp32 = triton.TYPE_FP32
    assert types == {"input": fp32, "logits": fp32, "marginals": fp32, "indices": triton.TYPE_INT64}
    labels = {tensor.name: tensor.label_filename for tensor in config.output}
    assert labels == {"logits": "labels.txt", "marginals": "labels.txt", "indices": ""}
    assert config.HasField("dynamic_batching")


def test_every_tensor_of_the_model_is_named(triton, in_graph_file, tmp_path):
    entry = write_repository(in_graph_file, tmp_path, name="a b/c")
    assert entry.name == "a_b_c"
    config = read(triton, entry)
    session = onnxruntime.InferenceSession(entry / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    for declared, tensors in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert shapes(declared) == {tensor.name: tuple(tensor.shape[1:]) for tensor in tensors}
    assert config.input[0].data_type == triton.TYPE_UINT8


def test_a_fixed_batch_is_part_of_the_shapes(triton, edited, tmp_path):
    config = read(triton, write_repository(edited(batch=4), tmp_path / "models"))
    assert config.max_batch_size == 0
    assert shapes(config.input) == {"input": (4, 3, 32, 40)}
    assert shapes(config.output)["indices"] == (4, K)
    assert not config.HasField("dynamic_batching")


def test_writing_again_replaces(triton, model_file, tmp_path):
    entry = write_repository(model_file, tmp_path)
    (entry / "1" / "stale").write_text("")
    write_repository(model_file, tmp_path, max_batch_size=2)
    assert not (entry / "1" / "stale").exists()
    assert read(triton, entry).max_batch_size == 2


def test_a_model_that_cannot_be_read_leaves_nothing(edited, tmp_path):
    with pytest.raises(ModelFileError, match="carries no topk_registry metadata"):
        write_repository(edited(props={"schema": None}), tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_the_command_writes_it(triton, model_file, tmp_path, capsys):
    folder = tmp_path / "models"
    assert serve.main([str(model_file), "--triton", str(folder), "--max-batch", "3"]) == 0
    assert capsys.readouterr().out == f"{folder / 'colours'}\n"
    assert read(triton, folder / "colours").max_batch_size == 3
