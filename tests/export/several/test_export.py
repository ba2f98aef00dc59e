"""The file of a model of several labels: its outputs against torch and the definition, its metadata, its refusals."""

import argparse
import json

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from tests.export.conftest import DATA, tiny
from tests.export.several.channels import NAMES, Channels, exported, pictures
from topk_export import ExportError, Predictor, export_onnx, verify
from topk_export.conversion.source import load_source
from topk_export.runtime.metadata import Metadata
from topk_export.verification.reference import sigmoids


def test_outputs_are_those_of_torch_and_of_the_definition(several_file):
    predictor = Predictor(several_file, device="cpu", threads=1)
    x = np.random.default_rng(1).standard_normal((5, *predictor.input_shape)).astype(np.float32)
    out = predictor.run(x)
    assert list(out) == ["logits", "probabilities"]
    logits = Channels().eval()(torch.from_numpy(x)).detach()
    np.testing.assert_allclose(out["logits"], logits.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out["probabilities"], logits.double().sigmoid().numpy(), rtol=1e-5)
    np.testing.assert_allclose(out["probabilities"], sigmoids(out["logits"]), rtol=1e-6)


def test_the_metadata_says_the_task(several_file):
    metadata = Predictor(several_file, device="cpu").metadata
    assert (metadata.task, metadata.several, metadata.k, metadata.class_names) == ("multilabel", True, 3, NAMES)
    assert set(metadata.outputs) == {"logits", "probabilities"}
    assert (metadata.sets, metadata.labels) == (None, None)
    again = Metadata.from_props(metadata.to_props())
    assert again == metadata


def test_the_head_is_verified_alone(several_file):
    report = verify(several_file, device="cpu")
    assert report["passed"]
    names = [check["name"] for check in report["checks"]]
    assert "probabilities (model)" in names
    assert "probabilities (head alone, far tail)" in names
    assert "logits against torch in float64, batch 5" in names


@pytest.mark.parametrize("opset", [18, 20])
def test_small_probabilities_keep_their_digits(tmp_path, opset):
    """onnxruntime's Sigmoid gives 0 for a logit of -18."""
    path = export_onnx(tiny(12), tmp_path, task="multilabel", temperature=0.5, opset=opset, data_config=DATA)
    operators = {node.op_type for node in onnx.load(str(path)).graph.node}
    assert "Sigmoid" not in operators
    checks = {check["name"]: check for check in json.loads((tmp_path / "model.report.json").read_text())["checks"]}
    assert checks["probabilities (head alone, far tail)"]["measured"] < 1e-5
    np.testing.assert_allclose(sigmoids(np.array([[-40.0, 0.0, 40.0]]))[0], [np.exp(-40.0), 0.5, 1.0], rtol=1e-15)


def test_a_run_of_several_labels_says_so_itself(tmp_path):
    model = tiny(6)
    torch.save({"state_dict": model.state_dict(), "arch": "resnet18"}, tmp_path / "a.pth")  # says nothing of a task
    import timm

    built = timm.create_model("resnet18", num_classes=6)
    args = argparse.Namespace(model="resnet18", num_classes=6, loss="bce", task="multilabel")
    torch.save({"state_dict": built.state_dict(), "arch": "resnet18", "args": args}, tmp_path / "last.pth.tar")
    source = load_source(tmp_path)
    assert (source.task, source.loss, source.k, source.temperature) == ("multilabel", "bce", None, None)
    del args.task
    torch.save({"state_dict": built.state_dict(), "arch": "resnet18", "args": args}, tmp_path / "last.pth.tar")
    assert load_source(tmp_path).task == "classification"
    args.task = "detection"
    torch.save({"state_dict": built.state_dict(), "arch": "resnet18", "args": args}, tmp_path / "last.pth.tar")
    with pytest.raises(ExportError, match="trained for the task 'detection', and classification and multilabel can"):
        export_onnx(tmp_path, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "several"}, "task must be one of classification, multilabel, got 'several'"),
        ({"outputs": ("marginals",)}, "outputs of a model of several labels must be some of logits, probabilities"),
        (
            {"task": None, "outputs": ("probabilities",)},
            "outputs must be some of logits, marginals, indices, each",
        ),
    ],
)
def test_what_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        exported(tmp_path, **options)


def test_logits_alone_cannot_be_ranked(tmp_path):
    path = exported(tmp_path, outputs=("logits",))
    with pytest.raises(ValueError, match="predictions need the outputs logits and probabilities; this model was"):
        Predictor(path, device="cpu")([np.zeros((16, 16, 3), np.uint8)])


def test_a_file_of_one_label_says_nothing_of_several(export):
    path = export(12, k=3)
    keys = {prop.key for prop in onnx.load(str(path)).metadata_props}
    assert "labels" not in keys
    assert Predictor(path, device="cpu").metadata.task == "image-classification"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"dtype": "fp16-backbone"}, {"dtype": "int8-static"}, {"preprocess": "in-graph"}],
    ids=lambda options: str(*options.values()),
)
def test_other_forms_of_the_file(tmp_path, options):
    samples = pictures(24)
    if options.get("dtype") == "int8-static":
        folder = tmp_path / "images" / "red"  # whose name is no label of theirs
        folder.mkdir(parents=True)
        for i, image in enumerate(samples.images):
            Image.fromarray(image).save(folder / f"{i}.png")
        options = {**options, "calibration_data": folder.parent}
    path = exported(tmp_path, **options)
    predictor = Predictor(path, device="cpu")
    out = predictor.run(predictor.preprocess(samples.images))
    np.testing.assert_allclose(out["probabilities"], sigmoids(out["logits"]), rtol=1e-6)
    report = json.loads((tmp_path / "model.report.json").read_text())
    assert report["passed"]
    if "calibration_data" in options:
        assert report["quantisation"]["same_best_class"] > 0.8
        assert "fp32" not in report["quantisation"]  # the accuracy of one label
