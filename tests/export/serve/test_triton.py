"""A Triton repository: its layout, and its configuration read with Triton's own schema."""

import importlib.util
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from PIL import Image
from tritonclient.utils import triton_to_np_dtype

from tests.export.colours import COLOURS, K, encoded, noise
from tests.export.groups import GROUPS, grouped
from topk_export import Predictor
from topk_export.calibration.graph import add_sets
from topk_export.commands import serve
from topk_export.errors import ModelFileError
from topk_export.serve.triton import write_repository
from topk_export.verification import storage
from topk_registry.conformal import PredictionSets, Thresholds, create_score


def schema() -> Any:
    """Triton's ``ModelConfig``, from the client's generated module alone: the package around it needs grpc."""
    return loaded(distribution("tritonclient").locate_file("tritonclient/grpc/model_config_pb2.py"))


def loaded(path: Any) -> Any:
    """A module from its file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, str(path))
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


@pytest.mark.slow
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


def described(tensors: Any) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in tensors]


class Backend:
    """What Triton's Python backend gives a model, as far as ours uses it."""

    class Tensor:
        def __init__(self, name: str, values: np.ndarray) -> None:
            self.name, self.values = name, values

        def as_numpy(self) -> np.ndarray:
            return self.values

    class InferenceResponse:
        def __init__(self, output_tensors: list[Any], error: Any = None) -> None:
            self.output_tensors, self.error = output_tensors, error

    TritonError = str

    @staticmethod
    def get_input_tensor_by_name(request: dict[str, Any], name: str) -> Any:
        return request[name]


def test_an_ensemble_takes_encoded_images(triton, model_file, predictor, tmp_path):
    joined = write_repository(model_file, tmp_path, max_batch_size=4, ensemble=True)
    names = ["colours", "colours_ensemble", "colours_preprocess"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    model, ensemble, first = (read(triton, tmp_path / name) for name in names)
    assert joined.name == "colours_ensemble"
    assert (joined / "1").is_dir()  # Triton loads no model without a version
    assert ensemble.platform == "ensemble"
    assert first.backend == "python"
    for config in (ensemble, first):
        assert config.max_batch_size == 4
        assert shapes(config.input) == {"image": (1,)}
        assert config.input[0].data_type == triton.TYPE_STRING
    assert described(first.output) == described(model.input)
    assert described(ensemble.output) == described(model.output)

    # each step reads what the request or a step before it gave, and gives what its model declares
    known = {tensor.name for tensor in ensemble.input}
    for step, config in zip(ensemble.ensemble_scheduling.step, (first, model), strict=True):
        assert (step.model_name, step.model_version) == (config.name, -1)
        assert set(step.input_map) == {tensor.name for tensor in config.input}
        assert set(step.input_map.values()) <= known
        assert set(step.output_map) == {tensor.name for tensor in config.output}
        known |= set(step.output_map.values())
    assert {tensor.name for tensor in ensemble.output} <= known


@pytest.mark.parametrize("file", ["model_file", "in_graph_file"])
def test_the_first_step_prepares_images_as_the_predictor_does(file, tmp_path, monkeypatch, request):
    model = request.getfixturevalue(file)
    folder = write_repository(model, tmp_path, ensemble=True).with_name("colours_preprocess")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", Backend)
    step = loaded(folder / "1" / "model.py").TritonPythonModel()
    step.initialize({"model_repository": str(folder), "model_version": "1"})
    images = [encoded(Image.fromarray(noise(*size)), "PNG") for size in ((61, 87), (9, 120))]
    rows = ([[image] for image in images], [[b"x"]])
    good, bad = step.execute([{"image": Backend.Tensor("image", np.array(batch, object))} for batch in rows])
    (tensor,) = good.output_tensors
    assert tensor.name == "input"
    np.testing.assert_array_equal(tensor.values, Predictor(model, device="cpu").preprocess(images))
    assert not bad.output_tensors
    assert "is not an image of a known format" in bad.error


KINDS = ("PNG", "JPEG", "BMP")


class Server:
    """The part of Triton that runs an ensemble, by the repository's own configurations; it checks what Triton checks.

    Triton refuses a step whose tensors are not those that the configuration declares, in name, type or shape.
    """

    def __init__(self, triton: Any, repository: Path) -> None:
        self._triton, self._repository = triton, repository

    def infer(self, name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        entry = self._repository / name
        config = read(self._triton, entry)
        assert config.name == name
        assert max(int(path.name) for path in entry.iterdir() if path.is_dir()) == 1
        for tensor in (*config.input, *config.output):
            assert tensor.dims  # empty ones are refused
            assert min(tensor.dims) >= 1
        for output in config.output:
            if output.label_filename:  # a label for each value
                assert len((entry / output.label_filename).read_text().splitlines()) == output.dims[-1]
        self._check(config, config.input, tensors)
        run = {"ensemble": self._ensemble, "python": self._python, "onnxruntime": self._onnx}
        outputs = run[config.platform or config.backend](config, entry, tensors)
        self._check(config, config.output, outputs)
        return outputs

    def _check(self, config: Any, declared: Any, tensors: dict[str, np.ndarray]) -> None:
        assert {tensor.name for tensor in declared} == tensors.keys()
        for tensor in declared:
            kind = self._triton.DataType.Name(tensor.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
            value = tensors[tensor.name]
            assert value.dtype == triton_to_np_dtype(kind), tensor.name
            assert value.shape[1:] == tuple(tensor.dims), tensor.name
            assert 1 <= len(value) <= config.max_batch_size

    def _ensemble(self, config: Any, entry: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        known = dict(tensors)
        for step in config.ensemble_scheduling.step:
            assert read(self._triton, entry.with_name(step.model_name)).max_batch_size >= config.max_batch_size
            given = {own: known[shared] for own, shared in step.input_map.items()}
            found = self.infer(step.model_name, given)
            known |= {shared: found[own] for own, shared in step.output_map.items()}
        return {output.name: known[output.name] for output in config.output}

    def _python(self, config: Any, entry: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        model = loaded(entry / "1" / "model.py").TritonPythonModel()
        model.initialize({"model_repository": str(entry), "model_version": "1"})
        request = {name: Backend.Tensor(name, value) for name, value in tensors.items()}
        (answer,) = model.execute([request])
        assert answer.error is None, answer.error
        return {tensor.name: tensor.values for tensor in answer.output_tensors}

    def _onnx(self, config: Any, entry: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        session = onnxruntime.InferenceSession(entry / "1" / "model.onnx", providers=["CPUExecutionProvider"])
        names = [output.name for output in config.output]
        given = {
            each.name: tensors[each.name].reshape(-1, *each.reshape.shape)
            if each.HasField("reshape")
            else tensors[each.name]
            for each in config.input
        }
        assert given.keys() == {each.name for each in session.get_inputs()}  # Triton takes no others, and needs all
        found = dict(zip(names, session.run(names, given), strict=True))
        for output in config.output:
            if output.HasField("reshape"):
                assert found[output.name].shape[1:] == tuple(output.reshape.shape)
                found[output.name] = found[output.name].reshape(-1, *output.dims)
        return found


@pytest.fixture(scope="module")
def sets_file(model_file, tmp_path_factory) -> Path:
    """A calibrated file, whose outputs are of two more types."""
    output = tmp_path_factory.mktemp("sets") / "colours.onnx"
    proto = add_sets(storage.load(model_file), PredictionSets(create_score("lac"), Thresholds(0.9)), 12, max_size=12)
    storage.save(proto, output)
    return output


@pytest.mark.parametrize("file", ["model_file", "in_graph_file", "sets_file"])
def test_the_steps_of_the_ensemble_give_the_predictors_bits(triton, file, tmp_path, monkeypatch, request):
    model = request.getfixturevalue(file)
    joined = write_repository(model, tmp_path, max_batch_size=4, ensemble=True)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", Backend)
    sizes = ((61, 87), (9, 120), (32, 40))  # shrunk, enlarged, kept
    images = [encoded(Image.fromarray(noise(*size)), kind) for size, kind in zip(sizes, KINDS, strict=True)]
    got = Server(triton, tmp_path).infer(joined.name, {"image": np.array([[image] for image in images], object)})
    predictor = Predictor(model, device="cpu")
    expected = predictor.run(predictor.preprocess(images))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].tobytes() == value.tobytes(), name


def test_a_repository_carries_groups(triton, model_file, tmp_path, monkeypatch):
    model = grouped(model_file, tmp_path / "colours.onnx")
    joined = write_repository(model, tmp_path / "models", max_batch_size=4, ensemble=True)
    entry = joined.with_name("colours")
    assert (entry / "groups.txt").read_text(encoding="utf-8").splitlines() == list(GROUPS)
    for config in (read(triton, entry), read(triton, joined)):
        group = config.input[1]
        assert (group.name, group.data_type, tuple(group.dims)) == ("group", triton.TYPE_INT64, (1,))
        assert not group.optional  # which Triton's ONNX backend refuses in models that it batches
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", Backend)
    images = [encoded(Image.fromarray(noise(32, 40, seed=i)), "PNG") for i in range(4)]
    numbers = [0, 3, 1, -1]
    given = {"image": np.array([[image] for image in images], object), "group": np.array(numbers)[:, None]}
    got = Server(triton, joined.parent).infer(joined.name, given)
    predictor = Predictor(model, device="cpu")
    expected = predictor.run(predictor.preprocess(images), np.array(numbers))
    assert got["set"].sum(-1).tolist() == expected["set_size"].tolist()
    for name, value in expected.items():
        assert got[name].tobytes() == value.tobytes(), name
    again = Predictor(entry / "1" / "model.onnx", device="cpu")  # the entry's file predicts, too
    np.testing.assert_array_equal(again.run(predictor.preprocess(images), np.array(numbers))["set"], expected["set"])


def test_a_fixed_batch_of_groups_is_part_of_the_shapes(triton, edited, tmp_path):
    model = grouped(edited(batch=4), tmp_path / "fixed.onnx")
    config = read(triton, write_repository(model, tmp_path / "models"))
    assert config.max_batch_size == 0
    assert shapes(config.input) == {"input": (4, 3, 32, 40), "group": (4,)}


def test_a_fixed_batch_has_no_ensemble(edited, tmp_path):
    with pytest.raises(ValueError, match="has a fixed batch size: an ensemble needs a file exported with --batch dyn"):
        write_repository(edited(batch=4), tmp_path / "models", ensemble=True)
    assert not (tmp_path / "models").exists()
