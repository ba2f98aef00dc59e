"""Static quantisation: 8 bits up to the last layer, float32 from there on, and a report of what that changes."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from tests.export.colours import COLOURS
from tests.export.conftest import DATA, tiny
from topk_export import export_onnx
from topk_export.conversion.quantise import Images
from topk_export.errors import ExportError, ImageError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.preprocess import Preprocess
from topk_export.verification import graph
from topk_export.verification.verify import verify
from topk_registry.folders.errors import WrongLabelsError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of each colour."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, rgb in COLOURS.items():
        (root / name).mkdir()
        for i in range(4):
            pixels = np.clip(np.array(rgb) + 25 * rng.standard_normal((8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def quantised(folder: Path, photos: Path, **options) -> Path:
    options = {"class_names": list(COLOURS), "data_config": DATA, "k": 3, "calibration_data": photos, **options}
    return export_onnx(tiny(12), folder, dtype="int8-static", **options)


@pytest.mark.slow
@pytest.mark.parametrize("preprocess", ["metadata", "in-graph"])
def test_the_backbone_has_8_bits_and_the_rest_float32(photos, tmp_path, preprocess):
    said = []
    path = quantised(tmp_path, photos, preprocess=preprocess, progress=said.append, force=True)  # it was never trained
    model = onnx.load(str(path))
    makers = {name: node for node in model.graph.node for name in node.output}
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    assert all(makers[name].op_type == "DequantizeLinear" for name in conv.input[:2])
    last = makers["logits"]
    assert last.op_type == "Gemm"
    assert not [name for name in last.input if name in makers and makers[name].op_type == "DequantizeLinear"]
    assert not {node.op_type for node in graph.head_nodes(model.graph)} & {"QuantizeLinear", "DequantizeLinear"}
    assert verify(path)["passed"]

    found = json.loads(path.with_name("model.report.json").read_text())["quantisation"]
    assert (found["calibrated_on"], found["measured_on"]) == (24, 24)
    assert 0.5 < found["same_best_class"] <= 1
    assert found["shared_top_k"] > 2 / 3
    assert set(found["fp32"]) == set(found["int8"]) == {"top1", "top3"}
    assert any("int8 against fp32 on 24 images" in line for line in said)


@pytest.mark.slow
def test_images_without_classes_and_a_fixed_batch(photos, tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    for i, path in enumerate(sorted(photos.rglob("*.png"))[:9]):
        (loose / f"{i}.png").write_bytes(path.read_bytes())
    path = quantised(tmp_path / "fixed", loose, batch=3)
    found = json.loads(path.with_name("model.report.json").read_text())["quantisation"]
    assert "fp32" not in found
    assert (found["calibrated_on"], found["measured_on"]) == (5, 4)
    with pytest.raises(ExportError, match="calibration needs at least 6 images, a batch of the file; got 5"):
        quantised(tmp_path / "larger", loose, batch=6)


@pytest.mark.slow
def test_labels_that_look_wrong_are_refused_before_anything_is_quantised(photos, tmp_path, monkeypatch):
    import onnxruntime.quantization

    monkeypatch.setattr(onnxruntime.quantization, "quantize_static", lambda *args, **kwargs: pytest.fail("quantised"))
    said = []
    with pytest.raises(WrongLabelsError, match=r"top-1 accuracy is .* on 24 images, where chance has 8.3%"):
        quantised(tmp_path / "new", photos, progress=said.append)
    assert any("; 12 classes by name" in line for line in said)
    assert not (tmp_path / "new" / "model.onnx").exists()


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        ([f"c{i}" for i in range(12)], list(range(12))),
        (list(COLOURS), list(range(12))),
        ([*list(COLOURS)[:-1], "new"], None),
    ],
    ids=["by order", "by name", "a part by name"],
)
def test_folders_are_classes_as_in_calibration(photos, tmp_path, names, numbers):
    """c10 comes after c2; labels that cannot be told are none, and the reason is said."""
    for old, new in zip(COLOURS, names, strict=True):
        shutil.copytree(photos / old, tmp_path / new)
    metadata = Metadata(3, 1.0, 12, tuple(COLOURS), Preprocess((3, 8, 8), *[(0.5,) * 3] * 2))
    images = Images(tmp_path, metadata, 48)
    if numbers is None:
        assert images.labels is None
        assert "images without labels, so that accuracy is not measured" in images.told
        assert "has the classes 'new'" in images.told
    else:
        means = 255 * (images.measured.mean((2, 3)) + 1) / 2
        distances = np.abs(means[:, None] - np.array(list(COLOURS.values()))).sum(-1)
        assert (distances.argmin(1) == images.labels).mean() > 0.9


def test_too_few_images(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="calibration needs at least 2 images"):
        quantised(tmp_path / "new", tmp_path / "empty")
    assert not (tmp_path / "new" / "model.onnx").exists()
