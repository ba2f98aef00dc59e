"""Models whose weights lie in a file beside them: every command knows both files, and says which one is missing."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from PIL import Image

from tests.export.colours import noise
from topk_export import ModelFileError, Predictor, verify
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_export.commands import predict as predict_command
from topk_export.commands import verify as verify_command
from topk_export.conversion.quantise import Images, quantise_dynamic, quantise_static
from topk_export.runtime.weights import copy_model, external_sizes, files_of, move_into_place
from topk_export.samples import Samples
from topk_export.scoring.work import settings_for
from topk_export.serve.site import RUNTIME, write_site
from topk_export.serve.triton import write_repository
from topk_export.verification import storage

N, K = 300, 5
NAME = "model.onnx.data"


@pytest.fixture(scope="module")
def model(export) -> Path:
    return export(N, k=K, external_data=True)


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return copy_model(model, tmp_path / "copy" / "model.onnx")[-1]


@pytest.fixture(autouse=True)
def folder_of_copies(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()


def outputs(path: Path, batch: int = 3) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((batch, 3, 8, 8)).astype(np.float32)
    return Predictor(path, device="cpu", threads=1).run(x)


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.slow
def test_the_weights_lie_beside_the_file_and_nothing_else_changes(model, tmp_path):
    inside = tmp_path / "inside.onnx"
    onnx.save(onnx.load(str(model)), str(inside))
    assert sorted(path.name for path in model.parent.glob("model.onnx*")) == ["model.onnx", NAME]
    assert_same(outputs(model), outputs(inside))
    onnx.checker.check_model(str(model), full_check=True)
    proto = onnx.load(str(model), load_external_data=False)
    assert max(len(tensor.raw_data) for tensor in proto.graph.initializer) < storage.SMALL
    report = verify(model)
    assert report["passed"]
    assert f"{NAME} belongs to this model" in {check["name"] for check in report["checks"]}
    assert not [check for check in verify(inside)["checks"] if "is the one of" in check["name"]]
    assert json.loads(model.with_name("model.report.json").read_text())["passed"]


@pytest.mark.slow
def test_the_sizes_are_those_that_onnx_reads(model):
    ends: dict[str, int] = {}
    for tensor in onnx.load(str(model), load_external_data=False).graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            assert info.offset % storage.ALIGNMENT == 0
            ends[info.location] = max(ends.get(info.location, 0), info.offset + info.length)
    assert external_sizes(model) == ends == {NAME: model.with_name(NAME).stat().st_size}


def test_a_file_that_is_no_model_names_no_weights(model, tmp_path):
    content, path = model.read_bytes(), tmp_path / "broken.onnx"
    rng = np.random.default_rng(0)
    for end in range(0, len(content), 997):
        path.write_bytes(content[:end] + rng.bytes(end % 50))
        external_sizes(path)
    path.write_bytes(b"")
    assert external_sizes(path) == {}
    with pytest.raises(ModelFileError, match="is not a model that onnxruntime can load"):
        Predictor(path)


def test_the_model_alone_is_an_error_that_names_the_other_file(copied, picture, capsys):
    gone = copied.with_name(NAME).rename(copied.with_name("elsewhere"))
    message = f"error: {copied} keeps its weights in {copied.with_name(NAME)}, which does not exist: move both together"
    for command in (verify_command.main, predict_command.main):
        assert command([str(copied), *([] if command is verify_command.main else [str(picture("red"))])]) == 1
        assert capsys.readouterr().err.startswith(message)
    with pytest.raises(ModelFileError, match="which does not exist: move both together"):
        settings_for(str(copied))
    gone.rename(copied.with_name(NAME))
    assert verify_command.main([str(copied)]) == 0


def test_half_of_the_weights(copied):
    weights = copied.with_name(NAME)
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    with pytest.raises(ModelFileError, match=rf"{NAME} holds {size - 1} bytes, .* needs {size} of it: copy it again"):
        Predictor(copied)


@pytest.mark.parametrize("name", ["../weights", "/etc/passwd", "a/b", "..\\weights", "C:weights"])
def test_weights_of_other_folders_are_not_read(copied, name):
    proto = onnx.load(str(copied), load_external_data=False)
    for tensor in filter(uses_external_data, proto.graph.initializer):
        tensor.external_data[0].value = name
    onnx.save(proto, str(copied))
    with pytest.raises(ModelFileError, match="keeps weights outside of its folder"):
        files_of(copied)


def test_a_model_may_be_renamed_alone(copied, model):
    renamed = copied.rename(copied.with_name("other name.onnx"))
    assert_same(outputs(renamed), outputs(model))
    assert pickle.loads(pickle.dumps(Predictor(renamed, device="cpu"))).name == "other name"


@pytest.mark.slow
def test_the_weights_of_another_model_fail_the_verification(copied):
    weights = copied.with_name(NAME)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # a sign or a digit of one number
    weights.write_bytes(content)
    failed = {check["name"] for check in verify(copied)["checks"] if check["passed"] is False}
    assert f"{NAME} belongs to this model" in failed


@pytest.mark.slow
def test_scores_are_those_of_the_weights_too(copied, model):
    digest = settings_for(str(model)).model
    assert settings_for(str(copied)).model == digest
    weights = copied.with_name(NAME)
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert settings_for(str(copied)).model != digest


def test_triton_gets_both_files(model, tmp_path):
    entry = write_repository(model, tmp_path / "models", name="flowers")
    assert sorted(path.name for path in (entry / "1").iterdir()) == ["model.onnx", NAME]
    assert_same(outputs(entry / "1" / "model.onnx"), outputs(model))


def test_the_page_gets_both_files(model, tmp_path):
    runtime, site = tmp_path / "ort", tmp_path / "site"
    runtime.mkdir()
    for name in RUNTIME:
        (runtime / name).write_text("")
    write_site(model, site, runtime)
    assert (site / NAME).read_bytes() == model.with_name(NAME).read_bytes()
    assert json.loads((site / "model.json").read_text())["weights"] == [NAME]


@pytest.mark.slow
def test_calibration_keeps_the_weights_beside(model, tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (8, 8, 3), np.uint8) for _ in range(60)]
    samples = Samples("noise", images, rng.integers(0, N, 60))
    output = tmp_path / "sets.onnx"
    calibrate_file(model, output, samples, Plan("lac", alpha=0.2), device="cpu", force=True)
    assert sorted(path.name for path in tmp_path.glob("sets*")) == ["sets.onnx", "sets.onnx.data"]
    shutil.move(model, tmp_path / "away.onnx")  # the new file needs the old one no more
    try:
        assert verify(output)["passed"]
        assert outputs(output)["set"].shape == (3, N)
    finally:
        shutil.move(tmp_path / "away.onnx", model)
    again = copy_model(output, tmp_path / "copy" / "renamed.onnx")[-1]
    calibrate_file(again, tmp_path / "copy" / "sets.onnx", samples, Plan("lac", alpha=0.5), device="cpu", force=True)
    assert verify(tmp_path / "copy" / "sets.onnx")["passed"]


def test_a_model_beyond_the_limit_is_written_so_unasked(model, tmp_path, monkeypatch):
    proto = onnx.load(str(model))
    monkeypatch.setattr(storage, "LIMIT", storage.size_of(proto))
    storage.save(proto, tmp_path / "small.onnx")
    assert files_of(tmp_path / "small.onnx") == [tmp_path / "small.onnx"]
    monkeypatch.setattr(storage, "LIMIT", storage.LIMIT - 1)
    storage.save(proto, tmp_path / "large.onnx")
    assert files_of(tmp_path / "large.onnx")[1:] == [tmp_path / "large.onnx.data"]
    assert_same(outputs(tmp_path / "large.onnx"), outputs(tmp_path / "small.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_quantisation_beyond_the_limit(kind, model, tmp_path, monkeypatch):
    """The same integers, whether the quantiser reads one file or two."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(6):
        Image.fromarray(noise(8, 8, seed=i)).save(folder / f"{i}.png")
    images = Images(folder, Predictor(model, device="cpu").metadata, 6)

    def quantised(limit: int) -> Path:
        monkeypatch.setattr(storage, "LIMIT", limit)
        proto = onnx.load(str(model))
        made = quantise_dynamic(proto) if kind == "dynamic" else quantise_static(proto, images, K)[0]
        path = tmp_path / f"{limit}.onnx"
        storage.save(made, path)
        return path

    assert_same(outputs(quantised(1000)), outputs(quantised(10**9)))
    assert (tmp_path / "1000.onnx.data").exists()


def test_an_interrupted_move_leaves_no_model_beside_the_weights_of_another(
    model, model_file, copied, tmp_path, monkeypatch
):
    staged = copy_model(model, tmp_path / "model.onnx")[-1]
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if source == staged:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        move_into_place(staged, copied)
    assert not copied.exists()
    assert copied.with_name(NAME).exists()
    monkeypatch.undo()
    staged = copy_model(model_file, tmp_path / "model.onnx")[-1]
    move_into_place(staged, copied)
    assert files_of(copied) == [copied]
    staged = copy_model(model, tmp_path / "model.onnx")[-1]
    move_into_place(staged, copied)
    assert_same(outputs(copied), outputs(model))
    staged = copy_model(model_file, tmp_path / "model.onnx")[-1]
    move_into_place(staged, copied)  # weights inside again
    assert not copied.with_name(NAME).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a full disk there")
@pytest.mark.parametrize("external", [False, True])
def test_a_full_disk_names_the_file(model, tmp_path, external):
    full = tmp_path / (NAME if external else "model.onnx")
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{full}'"):
        storage.save(onnx.load(model), tmp_path / "model.onnx", external=external)
