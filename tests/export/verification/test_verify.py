"""``verify``: on the file alone, on files that were tampered with, and on files that are none of ours."""

import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.export.conftest import tiny
from topk_export import ModelFileError, verify
from topk_export.commands import export as export_command
from topk_export.commands import verify as verify_command

N = 12


@pytest.fixture
def copied(export, tmp_path):
    """The exported file alone, without what lies beside it."""
    return shutil.copy(export(N, k=3, temperature=0.5), tmp_path / "copy.onnx")


def changed(path, change):
    model = onnx.load(str(path))
    change(model)
    onnx.save(model, str(path))
    return path


def failures(path) -> set[str]:
    return {check["name"] for check in verify(path)["checks"] if check["passed"] is False}


def test_the_file_alone_is_enough(copied):
    report = verify(copied)
    assert report["passed"]
    assert f"the logits against torch: no {copied.stem}.sample.npz beside the model" in report["not_verified"]
    assert not [check for check in report["checks"] if check["name"].startswith("logits against torch")]


def test_the_command(copied, capsys):
    assert verify_command.main([str(copied)]) == 0
    out = capsys.readouterr().out
    assert "ok   marginals (head alone, ties)" in out
    assert "not verified: any GPU provider" in out
    assert verify_command.main([str(copied), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_the_command_needs_no_torch(copied):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'timm', 'torchvision']))\n"
        f"from topk_registry.cli.main import main; raise SystemExit(main(['verify', {str(copied)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "ok   marginals (head alone, flat)" in result.stdout


def test_the_sample_of_another_export(export, copied, capsys):
    sample = export(N, k=3, temperature=0.5).with_name("model.sample.npz")
    assert verify_command.main([str(copied), "--sample", str(sample)]) == 0
    assert "logits against torch in float64, batch 5" in capsys.readouterr().out
    np.savez(copied.with_name("other.npz"), x=np.zeros(3))
    assert verify_command.main([str(copied), "--sample", str(copied.with_name("other.npz"))]) == 1
    assert "is not a sample of an export" in capsys.readouterr().err


def test_a_graph_that_runs_at_one_batch_only(copied):
    def change(model):
        model.graph.initializer.append(numpy_helper.from_array(np.array([2, 3, 8, 8]), "two"))
        model.graph.node.insert(0, onnx.helper.make_node("Reshape", ["input", "two"], ["pair"]))
        for node in model.graph.node[1:]:
            node.input[:] = ["pair" if name == "input" else name for name in node.input]

    report = verify(changed(copied, change))
    assert not report["passed"]
    at = {check["name"]: check for check in report["checks"] if check["name"].startswith("runs at batch")}
    assert {name for name, check in at.items() if check["passed"]} == {"runs at batch 2"}
    assert all("Reshape" in check["note"] for check in at.values() if not check["passed"])


def test_weights_that_changed_differ_from_the_sample(export, copied):
    shutil.copy(
        export(N, k=3, temperature=0.5).with_name("model.sample.npz"), copied.with_name(f"{copied.stem}.sample.npz")
    )

    def change(model):
        for tensor in model.graph.initializer:
            if list(tensor.dims) == [N]:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + 0.1, tensor.name))

    assert failures(changed(copied, change)) == {f"logits against torch in float64, batch {b}" for b in (1, 2, 5)}


def test_a_temperature_that_is_not_the_graphs(copied, capsys):
    def change(model):
        for entry in model.metadata_props:
            if entry.key == "temperature":
                entry.value = "0.7"

    changed(copied, change)
    assert {"marginals (model)", "marginals (head alone, normal)"} <= failures(copied)
    assert verify_command.main([str(copied)]) == 1
    assert "FAIL marginals (model)" in capsys.readouterr().out


def test_a_head_that_breaks_the_rules(copied):
    def change(model):
        model.graph.node.append(onnx.helper.make_node("Sigmoid", ["logits"], ["s"], doc_string="/home/me/x.py"))
        model.graph.output.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, ["batch", N]))

    found = failures(changed(copied, change))
    assert "no Loop, Scan, If, Sigmoid, Einsum, MatMul or integers in the head" in found
    assert "no stack traces or local paths in the graph" in found


def drop_metadata(model):
    del model.metadata_props[:]


def newer(model):
    for entry in model.metadata_props:
        if entry.key == "schema":
            entry.value = '"topk_registry.classifier/2"'


def broken(model):
    for entry in model.metadata_props:
        if entry.key == "k":
            entry.value = "{"


def fewer_names(model):
    for entry in model.metadata_props:
        if entry.key == "class_names":
            entry.value = '["a"]'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_metadata, r"carries no topk_registry metadata .*export it with `topk-registry export`"),
        (newer, r"has schema 'topk_registry\.classifier/2', newer than this version reads .*upgrade"),
        (broken, r"the metadata of .* is broken"),
        (fewer_names, r"12 classes, 1 names"),
    ],
)
def test_metadata_that_is_missing_newer_or_broken(copied, change, message, capsys):
    changed(copied, change)
    with pytest.raises(ModelFileError, match=message):
        verify(copied)
    assert verify_command.main([str(copied)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_files_that_are_no_models(tmp_path, capsys):
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    for path, message in ((text, "is not an ONNX model"), (tmp_path / "none.onnx", "does not exist")):
        with pytest.raises(ModelFileError, match=message):
            verify(path)
        assert verify_command.main([str(path)]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_export_command(tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"class {i}" for i in range(N)))
    arguments = [
        "test_resnet",
        str(tmp_path / "m.onnx"),
        "-k",
        "3",
        "--num-classes",
        str(N),
        "--class-names",
        str(names),
    ]
    options = ["--input-size", "3", "32", "32", "--external-data", "--triton", str(tmp_path / "models")]
    assert export_command.main([*arguments, *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "m.onnx")
    assert "verifying with onnxruntime" in captured.err
    assert (tmp_path / "m.labels.txt").read_text().startswith("class 0\n")
    for folder in (tmp_path, tmp_path / "models" / "m" / "1"):
        assert (folder / "m.onnx.data").stat().st_size > 1_000_000
    assert verify_command.main([str(tmp_path / "m.onnx")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.pth"], "none.pth does not exist"),
        (["no_such_model"], "neither timm nor torchvision has a model of that name"),
        (["test_resnet", "-k", "12", "--num-classes", "12"], "k must be an integer of at least 1 and below"),
        (["test_resnet", "--class-names", "none.txt"], "class names cannot be read"),
    ],
)
def test_errors_of_the_export_command_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert export_command.main(arguments) == 1
    err = capsys.readouterr().err
    assert f"error: {message}" in err or message in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_tiny_model_is_the_same_each_time():
    first, second = tiny(N).state_dict(), tiny(N).state_dict()
    assert all((first[key] == second[key]).all() for key in first)
