"""Every option of an export, what the file says about itself, and failures that leave nothing behind."""

import json

import numpy as np
import onnx
import pytest
import timm
import torch
from torch import nn

from tests.export.conftest import DATA, tiny
from topk_export import ExportError, ModelFileError, Predictor, export_onnx, head, load_source
from topk_export.errors import VerificationError, first_line
from topk_export.export import _prepare
from topk_export.runtime.metadata import MULTILABEL, MULTILABEL_OUTPUTS, OUTPUTS, Metadata
from topk_export.verify import marginals, sigmoids, verify_file

N = 12


def run(path, x, **others):
    return Predictor(path, device="cpu", threads=1).run(x, **others)


def report_of(path) -> dict:
    return json.loads(path.with_name(f"{path.stem}.report.json").read_text())


def metadata_of(path) -> Metadata:
    return Metadata.from_props({entry.key: entry.value for entry in onnx.load(str(path)).metadata_props})


@pytest.fixture(scope="module")
def file(export):
    return export(N, k=3, temperature=0.5, class_names=tuple("abcdefghijkl"))


def test_outputs_are_those_of_torch(file):
    x = np.random.default_rng(1).standard_normal((7, 3, 8, 8)).astype(np.float32)
    out = run(file, x)
    with torch.no_grad():
        logits = tiny(N).eval()(torch.from_numpy(x))
    np.testing.assert_allclose(out["logits"], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out["probabilities"], logits.softmax(-1), rtol=1e-5)
    np.testing.assert_allclose(out["marginals"], marginals(logits.numpy(), 3, 0.5), rtol=1e-5)
    np.testing.assert_array_equal(out["indices"], logits.topk(3).indices)


def test_the_file_describes_itself(file):
    said = metadata_of(file)
    assert (said.k, said.temperature, said.num_classes, said.class_names) == (3, 0.5, N, tuple("abcdefghijkl"))
    assert list(said.preprocess.input_size) == [3, 8, 8]
    assert (said.backbone, said.weights) == ("Sequential", "model")
    assert (said.dtype, said.opset, said.in_graph) == ("fp32", 18, False)
    assert said.outputs == OUTPUTS
    assert {"torch", "timm", "onnx"} <= said.versions.keys()
    assert Metadata.from_props(said.to_props()) == said
    assert file.with_name("model.labels.txt").read_text().split() == list("abcdefghijkl")
    assert json.loads(file.with_name("model.preprocess.json").read_text())["input_size"] == [3, 8, 8]


def test_the_report_lists_what_was_not_verified(file):
    report = report_of(file)
    assert report["passed"] is True
    assert report["device"] == "cpu"
    assert any("GPU" in line for line in report["not_verified"])
    names = {check["name"] for check in report["checks"]}
    assert {
        *("onnx.checker, full", "runs at batch 1", "logits against torch in float64, batch 5", "marginals (model)"),
        *("marginals (head, ties)", "marginals (head, NaN)", "marginals (head, class list of k classes)"),
    } <= names


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"opset": 21}, {"dtype": "fp16"}, {"task": MULTILABEL, "temperature": 2.0}], ids=str
)
def test_options_pass_the_verification(export, options):
    path = export(N, k=3, **options)
    assert report_of(path)["passed"] is True
    model = onnx.load(str(path))
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert (onnx.TensorProto.FLOAT16 in types) == (options.get("dtype") == "fp16")
    assert model.opset_import[0].version == options.get("opset", 18)
    assert {output.type.tensor_type.elem_type for output in model.graph.output} <= {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT64,
    }


@pytest.mark.slow
def test_a_multilabel_file_gives_a_sigmoid_per_class(export):
    path = export(N, k=3, task=MULTILABEL, temperature=2.0)
    assert metadata_of(path).outputs == MULTILABEL_OUTPUTS
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    mask = np.arange(N) < 2
    out = run(path, x, allowed=mask)
    np.testing.assert_allclose(out["probabilities"][:, :2], sigmoids(out["logits"], 2.0)[:, :2], rtol=1e-5)
    assert (out["probabilities"][:, 2:] == 0).all()
    (prediction,) = Predictor(path, device="cpu")([np.zeros((8, 8, 3), np.uint8)], allowed=["1"])
    assert [entry.name for entry in prediction.top] == ["1"]
    assert prediction.top[0].marginal is None


@pytest.mark.slow
@pytest.mark.parametrize("model", ["test_vit", "torchvision:squeezenet1_1"])
def test_models_by_name(model, tmp_path):
    size = {"data_config": {"input_size": (3, 64, 64)}} if model.startswith("torchvision") else {}
    path = export_onnx(load_source(model, random_weights=True, num_classes=N, **size), tmp_path, k=5)
    assert report_of(path)["passed"]
    assert (metadata_of(path).backbone, metadata_of(path).weights) == (model, "random")


@pytest.mark.slow
def test_the_files_of_an_export_have_its_name_and_verification_is_optional(tmp_path):
    path = export_onnx(tiny(6), tmp_path / "a.onnx", k=2, data_config=DATA, verify=False)
    assert report_of(path)["passed"] is None
    kinds = ("labels.txt", "onnx", "preprocess.json", "report.json", "sample.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a.{kind}" for kind in kinds]
    assert metadata_of(path).class_names == tuple("012345")


@pytest.mark.slow
def test_a_failed_verification_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path, before = tmp_path / "model.onnx", {"model.onnx": b"old", "model.report.json": b"{}"}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    inside = head._inside
    monkeypatch.setattr(head, "_inside", lambda add, *others: add("Mul", inside(add, *others), 3.0))
    with pytest.raises(VerificationError, match=r"(?s)FAIL marginals \(model\).*limit 1e-05"):
        export_onnx(tiny(N), path, k=3, data_config=DATA)
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert json.loads(after.pop("model.failed.json"))["passed"] is False
    assert after == before


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("topk_export.export._convert", full)
    with pytest.raises(OSError, match=r"No space left on device: .*b\.onnx"):
        export_onnx(tiny(N), tmp_path / "a" / "b.onnx", k=3, data_config=DATA)
    assert not list((tmp_path / "a").iterdir())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"k": N}, "below the number of classes"),
        ({"k": 0}, "at least 1"),
        ({"k": 3, "temperature": 0.0}, "temperature"),
        ({"k": 3, "opset": 22}, "opset"),
        ({"k": 3, "dtype": "int8"}, "dtype"),
        ({"k": 3, "task": "regression"}, "task"),
        ({"k": 3, "class_names": ["a"]}, "12 class names"),
        ({"k": 3, "class_names": ["a\nb", *"bcdefghijkl"]}, "one line of text"),
    ],
    ids=str,
)
def test_bad_options(options, word, tmp_path):
    with pytest.raises((ValueError, ExportError), match=word):
        export_onnx(tiny(N), tmp_path / "new", data_config=DATA, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("model", "word"),
    [(nn.Conv2d(3, 3, 1), "not a classifier"), (timm.create_model("test_resnet", num_classes=0), "num_classes=0")],
)
def test_models_that_are_not_classifiers(model, word, tmp_path):
    with pytest.raises(ExportError, match=word):
        export_onnx(model, tmp_path / "new", k=2, data_config=DATA)
    assert not (tmp_path / "new").exists()


class Squashing(nn.Module):
    """A classifier that ends in a function of its scores."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        self.body, self.end = tiny(N), end

    def forward(self, x):
        return self.end(self.body(x))


class Uneven(nn.Module):
    """Probabilities without a Softmax at the end."""

    def forward(self, x):
        e = x.exp()
        return e / e.sum(-1, keepdim=True)


class SpelledSigmoid(nn.Module):
    def forward(self, x):
        return 1 / (1 + (-x).exp())


@pytest.mark.parametrize("end", [nn.Softmax(-1), Uneven()], ids=["softmax", "division"])
def test_probabilities_are_not_taken_for_scores(end, tmp_path):
    with pytest.raises(ExportError, match="topk-registry attach"):
        export_onnx(Squashing(end), tmp_path, k=3, data_config=DATA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "name"),
    [(nn.Sigmoid(), "sigmoid"), (SpelledSigmoid(), "sigmoid"), (nn.Hardsigmoid(), "hard sigmoid")],
    ids=["Sigmoid", "spelled out", "HardSigmoid"],
)
def test_a_graph_that_ends_in_a_squashing_operator_is_an_error(end, name, tmp_path):
    with pytest.raises(ExportError, match=f"ends in a {name}"):
        export_onnx(Squashing(end), tmp_path, k=3, data_config=DATA)
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    """A classifier whose forward pass depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(192, N)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc(x if x.sum() > 0 else -x)


@pytest.mark.slow
def test_a_model_that_torch_cannot_trace(tmp_path):
    # some versions of torch convert the branch that the example takes; the file then fails its verification
    with pytest.raises(ExportError, match=r"cannot convert the model|failed its verification") as caught:
        export_onnx(Branching(), tmp_path, k=3, data_config=DATA)
    assert "\x1b" not in str(caught.value)
    assert first_line(ValueError("\x1b[31mFailed to \x1b[1;96mexport\x1b[0m.\nmore")) == "Failed to export."


def test_the_cause_of_a_failed_conversion_is_named(tmp_path, monkeypatch):
    def fail(*args, **options):
        try:
            raise TypeError("\x1b[31munsupported operator\x1b[0m\nmore")
        except TypeError as error:
            raise RuntimeError("Failed to export.") from error

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ExportError, match=r"cannot convert the model: Failed.*: TypeError: unsupported operator"):
        export_onnx(nn.Sequential(nn.Flatten(), nn.Linear(192, N)), tmp_path, k=3, data_config=DATA)
    assert not list(tmp_path.iterdir())


class Cancelling(nn.Module):
    """A classifier whose float32 loses four digits: it takes the difference of two large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 6)

    def forward(self, x):
        large = self.fc(x.mean((2, 3)))
        return (large + 4096.0).sin() + (large * 1024).sin()


@pytest.mark.slow
def test_a_model_that_loses_digits_in_float32_is_compared_with_float64(tmp_path):
    path = export_onnx(Cancelling(), tmp_path, k=2, data_config=DATA)
    (check,) = (c for c in report_of(path)["checks"] if c["name"] == "logits against torch in float64, batch 5")
    assert 1e-5 < check["tolerance"] < 1e-1


class Attention(nn.Module):
    """Attention over windows: five axes, as in nest and hiera, which torch.onnx refuses when it is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn, self.fc = True, nn.Linear(3, 6)

    def forward(self, x):
        q = x.flatten(2).transpose(1, 2).unflatten(1, (2, 2, -1))  # [B, 2, 2, pixels, 3]
        if self.fused_attn:
            q = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        else:
            q = (q @ q.transpose(-1, -2) / 3**0.5).softmax(-1) @ q
        return self.fc(q.mean((1, 2, 3)))


def test_fused_attention_is_switched_off_in_the_exported_copy_only():
    model = Attention()
    backbone, n = _prepare(load_source(model, data_config=DATA))
    assert (model.fused_attn, backbone.fused_attn, n) == (True, False, 6)


@pytest.mark.slow
def test_a_file_of_unknown_normalization_takes_arrays_only(tmp_path, picture):
    config = {"input_size": (3, 8, 8)}
    with pytest.warns(UserWarning, match="takes arrays only"):
        path = export_onnx(tiny(2), tmp_path, data_config=config)
    assert metadata_of(path).k == 1
    predictor = Predictor(path, device="cpu", threads=1)
    assert predictor.run(np.zeros((2, 3, 8, 8), np.float32))["logits"].shape == (2, 2)
    with pytest.raises(ModelFileError, match="preprocessing of images is unknown"):
        predictor([picture("red")])
    assert verify_file(path)["passed"]
    with pytest.raises(ModelFileError, match="images is unknown"), pytest.warns(UserWarning, match="arrays only"):
        export_onnx(tiny(2), tmp_path, in_graph=True, data_config=config)
