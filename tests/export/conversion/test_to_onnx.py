"""Every option of an export, what the file says of itself, and failures that leave nothing behind."""

import json
import re

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from tests.export.conftest import DATA, tiny
from topk_export import ExportError, ModelFileError, Predictor, export_onnx, verify
from topk_export.commands import predict, score, serve
from topk_export.conversion.head import run_and_find
from topk_export.conversion.source import load_source
from topk_export.conversion.to_onnx import _prepare
from topk_export.runtime.metadata import Metadata

N = 12


def run(path, x):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {session.get_inputs()[0].name: x}), strict=True))


def props(path) -> dict:
    model = onnx.load(str(path))
    return {entry.key: json.loads(entry.value) for entry in model.metadata_props}


def images(batch: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (batch, 8, 8, 3)).astype(np.uint8)


def normalised(pixels: np.ndarray, path) -> np.ndarray:
    said = props(path)
    mean, std = np.array(said["mean"], np.float32), np.array(said["std"], np.float32)
    return ((pixels.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2)


@pytest.mark.slow
def test_outputs_are_those_of_torch(export):
    path = export(N, k=3, temperature=0.5)
    x = np.random.default_rng(1).standard_normal((7, 3, 8, 8)).astype(np.float32)
    out = run(path, x)
    with torch.no_grad():
        wanted = tiny(N).eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(out["logits"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out["marginals"].sum(-1), 3, rtol=1e-5)
    assert (np.sort(out["indices"]) == np.sort(np.argsort(-wanted)[:, :3])).all()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["test_vit", "torchvision:squeezenet1_1"])
def test_models_by_name(model, tmp_path):
    size = {"data_config": {"input_size": (3, 64, 64)}} if model.startswith("torchvision") else {}
    path = export_onnx(model, tmp_path, k=5, num_classes=N, **size)
    report = json.loads((tmp_path / "model.report.json").read_text())
    assert report["passed"]
    assert props(path)["backbone"] == model


@pytest.mark.slow
def test_the_metadata_is_complete(export):
    said = props(export(N, k=3, temperature=0.5, class_names=tuple("abcdefghijkl")))
    expected = {
        "schema": "topk_registry.classifier/1",
        "task": "image-classification",
        "k": 3,
        "temperature": 0.5,
        "num_classes": N,
        "class_names": list("abcdefghijkl"),
        "input_size": [3, 8, 8],
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "color": "RGB",
        "range": [0.0, 1.0],
        "backbone": "Sequential",
        "opset": 18,
        "dtype": "fp32",
        "in_graph": False,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "checkpoint_sha256": None,
        "licence": None,
    }
    assert {key: said[key] for key in expected} == expected
    assert len(said["mean"]) == len(said["std"]) == 3
    assert "sum to k" in said["outputs"]["marginals"]
    assert "not a softmax" in said["outputs"]["marginals"]


@pytest.mark.slow
def test_the_files_beside_it(export):
    path = export(N, k=3, temperature=0.5, class_names=tuple("abcdefghijkl"))
    assert path.with_name("model.labels.txt").read_text().split() == list("abcdefghijkl")
    assert json.loads(path.with_name("model.preprocess.json").read_text())["input_size"] == [3, 8, 8]
    sample = np.load(path.with_name("model.sample.npz"))
    np.testing.assert_allclose(run(path, sample["input"])["logits"], sample["torch_logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_classes_without_names_are_numbered(export):
    assert props(export(N, k=3, temperature=0.5))["class_names"] == [str(i) for i in range(N)]


@pytest.mark.slow
def test_the_graph_can_normalise(export):
    plain, inside = export(N, k=3, temperature=0.5), export(N, k=3, temperature=0.5, preprocess="in-graph")
    assert props(inside)["in_graph"] is True
    got, wanted = run(inside, images()), run(plain, normalised(images(), plain))
    np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_fixed_batch(export):
    path = export(N, k=3, batch=3)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [3, 3, 8, 8]
    assert [output.shape[0] for output in session.get_outputs()] == [3, 3, 3]
    report = json.loads(path.with_name("model.report.json").read_text())
    assert report["passed"]
    assert "head alone, ties" in str(report)


@pytest.mark.slow
def test_outputs_come_in_the_order_asked_for_in_a_newer_operator_set(export):
    path = export(N, k=3, outputs=("indices", "marginals"), opset=20)
    assert [entry.version for entry in onnx.load(str(path)).opset_import] == [20]
    assert list(run(path, np.zeros((1, 3, 8, 8), np.float32))) == ["indices", "marginals"]
    assert set(props(path)["outputs"]) == {"indices", "marginals"}
    assert json.loads(path.with_name("model.report.json").read_text())["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16-backbone", "int8-dynamic"])
def test_a_smaller_backbone_under_an_exact_head(export, dtype):
    path = export(N, k=3, temperature=0.5, dtype=dtype)
    full = export(N, k=3, temperature=0.5)
    model, wanted = onnx.load(str(path)), onnx.load(str(full))
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    small = onnx.TensorProto.FLOAT16 if dtype == "fp16-backbone" else onnx.TensorProto.UINT8
    assert small in kinds
    assert small not in {tensor.data_type for tensor in wanted.graph.initializer}
    out = run(path, normalised(images(), path))
    assert {value.dtype for value in out.values()} == {np.dtype(np.float32), np.dtype(np.int64)}
    np.testing.assert_allclose(out["marginals"].sum(-1), 3, rtol=1e-5)
    report = json.loads(path.with_name("model.report.json").read_text())
    assert report["dtype"] == dtype
    assert report["passed"]


def test_an_operator_set_that_leaves_the_gpu_is_a_warning(tmp_path):
    with (
        pytest.warns(UserWarning, match="opset 22: onnxruntime's CUDA provider leaves MaxPool to the CPU"),
        pytest.raises(ValueError, match="below the number of classes"),
    ):
        export_onnx(tiny(N), tmp_path, k=N, opset=22, data_config=DATA)


@pytest.mark.slow
def test_the_report_says_what_was_not_looked_at(export):
    path = export(N, k=3, temperature=0.5)
    report = json.loads(path.with_name("model.report.json").read_text())
    assert report["passed"] is True
    assert report["device"] == "cpu"
    assert report["not_verified"] == ["any GPU provider: this was run on the CPU"]
    names = [check["name"] for check in report["checks"]]
    for wanted in (
        "onnx.checker, full",
        "runs at batch 1",
        "runs at batch 2",
        "runs at batch 5",
        "logits against torch in float64, batch 5",
        "marginals (model)",
        "sum of marginals is k (head alone, gaps of 100)",
        "top-k classes (head alone, ties)",
    ):
        assert wanted in names
    assert {"torch", "onnx", "timm"} <= set(report["versions"])
    assert {"onnxruntime", "onnxruntime-gpu"} & set(report["versions"])  # whichever wheel it is


@pytest.mark.slow
def test_an_export_that_is_not_verified_says_so(tmp_path):
    export_onnx(tiny(N), tmp_path, k=3, verify=False, data_config=DATA)
    report = json.loads((tmp_path / "model.report.json").read_text())
    assert report["passed"] is None
    assert "asked not to verify" in report["not_verified"][0]


@pytest.mark.slow
def test_an_export_that_fails_its_verification_leaves_what_was_there(tmp_path, monkeypatch):
    path = export_onnx(tiny(N), tmp_path, k=3, verify=False, data_config=DATA)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr("topk_registry.nn.head.static_marginals", lambda s, k, temperature: s.softmax(-1) * k)
    with pytest.raises(ExportError, match=r"(?s)failed its verification and was not written.*marginals \(model\)"):
        export_onnx(tiny(N), path, k=3, data_config=DATA)
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert json.loads(after.pop("model.refused.json"))["passed"] is False  # its report, and nothing else
    assert after == before


@pytest.mark.slow
def test_an_export_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnx.save", full)
    with pytest.raises(OSError, match="No space left"):
        export_onnx(tiny(N), tmp_path / "a" / "b.onnx", k=3, data_config=DATA)
    assert not list((tmp_path / "a").iterdir())


class Branching(nn.Module):
    """A classifier whose forward pass depends on the values it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(192, N)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc(x if x.sum() > 0 else -x)


def test_a_model_that_torch_cannot_trace(tmp_path):
    # some versions of torch convert the branch that the example takes: what comes out does not run, or not as torch
    with pytest.raises(ExportError, match=r"torch\.onnx cannot convert the model|failed its verification"):
        export_onnx(Branching(), tmp_path, k=3, data_config=DATA)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": N}, "k must be an integer of at least 1 and below the number of classes, 12; got 12"),
        ({"k": 0}, "k must be an integer of at least 1"),
        ({"k": 3, "temperature": 0.0}, "temperature must be above 0 and finite, got 0.0"),
        ({"k": 3, "opset": 17}, "opset must be 18 to 23, got 17"),
        ({"k": 3, "batch": 0}, "batch must be 'dynamic' or a number of at least 1, got 0"),
        ({"k": 3, "dtype": "fp16"}, "dtype must be one of fp32, fp16-backbone, int8-dynamic, int8-static, got 'fp16'"),
        ({"k": 3, "dtype": "int8-static"}, "dtype int8-static needs calibration_data (--calibration-data)"),
        ({"k": 3, "calibration_data": "images"}, "calibration_data (--calibration-data), and no other dtype takes it"),
        (
            {"k": 3, "dtype": "int8-static", "calibration_data": "/no/folder"},
            "the folder /no/folder does not exist",
        ),
        ({"k": 3, "preprocess": "none"}, "preprocess must be one of metadata, in-graph, got 'none'"),
        ({"k": 3, "outputs": ()}, "outputs must be some of logits, marginals, indices"),
        ({"k": 3, "outputs": "logits"}, "outputs must be some of logits, marginals, indices"),
        ({"k": 3, "class_names": ["a"]}, "expected 12 class names, one for each class of the model, got 1"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises((ValueError, ExportError), match=re.escape(message)):
        export_onnx(tiny(N), tmp_path / "new", data_config=DATA, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Conv2d(3, 3, 1), "is no classifier: expected logits [batch, classes], it gives [2, 3, 8, 8]"),
        (timm.create_model("test_resnet", num_classes=0), "test_resnet has no head, and only classifiers can be"),
        (nn.Sequential(*tiny(N)[:2], nn.BatchNorm2d(8), *tiny(N)[2:4]), "Sequential has no head, and only classifiers"),
        (nn.Sequential(nn.Linear(8, 4)), "is no classifier: expected logits [batch, classes], it gives [2, 3, 8, 4]"),
        (nn.Sequential(nn.Flatten(), nn.Linear(7, 4)), "does not run on an input of size [3, 8, 8]"),
    ],
)
def test_models_that_are_no_classifiers(model, message, tmp_path):
    with pytest.raises(ExportError, match=re.escape(message)):
        export_onnx(model, tmp_path / "new", k=2, data_config=DATA)
    assert not (tmp_path / "new").exists()


def test_the_metadata_survives_a_round_trip(export):
    model = onnx.load(str(export(N, k=3, temperature=0.5)))
    stored = {entry.key: entry.value for entry in model.metadata_props}
    assert Metadata.from_props(stored).to_props() == stored


class Own(nn.Module):
    """A classifier whose head has a name of its own, and is not the module that was added last."""

    def __init__(self, *, scale: bool = False) -> None:
        super().__init__()
        self.answer = nn.Linear(3, 6)
        self.neck = nn.Linear(3, 3)
        self.other = nn.Linear(6, 6)
        self.scale = nn.BatchNorm1d(6) if scale else nn.Identity()

    def forward(self, x):
        return self.scale(self.answer(self.neck(x.mean((2, 3)))))


def test_a_head_is_found_by_what_it_does():
    x = torch.zeros(2, 3, 8, 8)
    assert run_and_find(Own().eval(), x, None)[1] == "answer"
    assert run_and_find(timm.create_model("test_resnet", num_classes=6).eval(), x, None)[1] == "fc"
    source = load_source(Own(scale=True), data_config=DATA)
    with pytest.raises(ExportError, match=r"Own has no head, .* name the module of its scores \(head=, .*--head\)"):
        _prepare(source)
    assert _prepare(source, "scale")[1] == 6
    with pytest.raises(ExportError, match=r"no module 'fc' .*; its linear layers: answer, neck, other"):
        _prepare(source, "fc")
    with pytest.raises(ExportError, match="the head 'other' is not used when Own runs"):
        _prepare(source, "other")


@pytest.mark.slow
def test_a_file_of_unknown_transform_takes_arrays_alone(tmp_path, picture, capsys):
    with pytest.warns(UserWarning, match="the file says 'unknown'"):
        path = export_onnx(Own(), tmp_path, data_config={"input_size": (3, 8, 8)})
    said = props(path)
    assert (said["color"], said["mean"], said["std"]) == ("unknown", [], [])
    predictor = Predictor(path, device="cpu", threads=1)
    assert predictor.run(np.zeros((2, 3, 8, 8), np.float32))["logits"].shape == (2, 6)
    with pytest.raises(ModelFileError, match="does not say how images become its input"):
        predictor([picture("red")])
    assert verify(path)["passed"]
    for command in (
        [predict.main, str(path), str(picture("red"))],
        [score.main, str(path), str(picture("red")), "--output", str(tmp_path / "scores")],
        [serve.main, str(path), "--port", "0"],
        [serve.main, str(path), "--site", str(tmp_path / "site")],
        [serve.main, str(path), "--triton", str(tmp_path / "triton"), "--ensemble"],
    ):
        assert command[0]([*command[1:]]) == 1
        assert capsys.readouterr().err.startswith("error: the file does not say how images become its input")
    with pytest.raises(ModelFileError, match="does not say"), pytest.warns(UserWarning, match="unknown"):
        export_onnx(Own(), tmp_path, preprocess="in-graph", data_config={"input_size": (3, 8, 8)})


@pytest.mark.slow
def test_the_default_k_is_below_the_number_of_classes(tmp_path):
    assert props(export_onnx(tiny(2), tmp_path, data_config=DATA))["k"] == 1
