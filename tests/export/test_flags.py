"""Flags of the commands export, attach and calibrate reach the functions that do the work."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from tests.export.test_exact import RECIPE
from topk_export import calibrate, foreign, source
from topk_export import export as exporting
from topk_export.commands import attach as attach_command
from topk_export.commands import calibrate as calibrate_command
from topk_export.commands import export as export_command
from topk_registry.conformal import Score


def options_of(mock: Mock) -> dict[str, object]:
    (call,) = mock.call_args_list
    return {name: value for name, value in call.kwargs.items() if name != "progress"}


@pytest.fixture
def names(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("a\nb\n")
    return str(path)


def exported(monkeypatch, *flags):
    """Return the options with which the command loads the source, and those with which it exports."""
    load = Mock(return_value=SimpleNamespace(name="m", weights="random", preprocess=RECIPE))
    export = Mock(return_value="m.onnx")
    monkeypatch.setattr(source, "load_source", load)
    monkeypatch.setattr(exporting, "export_onnx", export)
    assert export_command.main(["m", *flags]) == 0
    assert load.call_args.args == ("m",)
    return options_of(load), options_of(export)


def test_export(monkeypatch, names):
    loaded, written = exported(monkeypatch)
    assert loaded == {
        "model": None, "model_kwargs": None, "num_classes": None, "pretrained": False, "random_weights": False,
        "ema": True, "data_config": {},
    }  # fmt: skip
    assert written == {
        "k": None, "temperature": None, "task": None, "dtype": "fp32", "opset": 18, "in_graph": False,
        "class_names": None, "marginals": True, "verify": True,
    }  # fmt: skip
    flags = "-k 3 --temperature 2 --task multilabel --dtype fp16 --opset 20 --in-graph --no-marginals --no-verify"
    of_model = "--model n --model-kwargs a=1 --num-classes 2 --pretrained --random-weights --no-ema --exif"
    data = "--input-size 1 8 9 --mean 0.1 --std 0.2 --interpolation bicubic --crop-pct 0.9 --crop-mode squash"
    words = f"{flags} {of_model} {data}".split()
    loaded, written = exported(monkeypatch, *words, "--class-names", names)
    assert loaded == {
        "model": "n", "model_kwargs": {"a": 1}, "num_classes": 2, "pretrained": True, "random_weights": True,
        "ema": False, "data_config": {
            "input_size": [1, 8, 9], "mean": [0.1], "std": [0.2], "interpolation": "bicubic", "crop_pct": 0.9,
            "crop_mode": "squash", "exif": True,
        },
    }  # fmt: skip
    assert written == {
        "k": 3, "temperature": 2.0, "task": "multilabel", "dtype": "fp16", "opset": 20, "in_graph": True,
        "class_names": ("a", "b"), "marginals": False, "verify": False,
    }  # fmt: skip


def attached(monkeypatch, *flags):
    function = Mock(return_value="out.onnx")
    monkeypatch.setattr(foreign, "attach", function)
    assert attach_command.main(["m.onnx", "out.onnx", *flags]) == 0
    assert function.call_args.args == ("m.onnx", "out.onnx")
    return options_of(function)


def test_attach(monkeypatch, names, tmp_path):
    assert attached(monkeypatch) == {
        "k": None, "temperature": 1.0, "task": None, "logits": None, "from_probabilities": False, "class_names": None,
        "preprocess": None, "marginals": True, "replace": False, "inputs": None, "verify": True,
    }  # fmt: skip
    np.savez(tmp_path / "x.npz", x=np.arange(3))
    flags = "-k 3 --temperature 2 --task multilabel --logits z --from-probabilities --preprocess p --no-marginals"
    given = [*flags.split(), "--replace", "--no-verify", "--class-names", names, "--inputs", str(tmp_path / "x.npz")]
    options = attached(monkeypatch, *given)
    assert {name: values.tolist() for name, values in options.pop("inputs").items()} == {"x": [0, 1, 2]}
    assert options == {
        "k": 3, "temperature": 2.0, "task": "multilabel", "logits": "z", "from_probabilities": True,
        "class_names": ("a", "b"), "preprocess": "p", "marginals": False, "replace": True, "verify": False,
    }  # fmt: skip


def test_an_error_of_attach_is_one_line(tmp_path, capsys):
    assert attach_command.main([str(tmp_path / "none.onnx"), str(tmp_path / "out.onnx")]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1] == f"error: {tmp_path / 'none.onnx'} does not exist or is not a file"
    )


def calibrated(monkeypatch, folder, *flags):
    np.save(folder / "z.npy", np.eye(3, dtype=np.float32))
    np.save(folder / "y.npy", np.arange(3))
    function = Mock(return_value=SimpleNamespace(lines=list))
    monkeypatch.setattr(calibrate, "calibrate_file", function)
    data = ["--logits", str(folder / "z.npy"), "--labels", str(folder / "y.npy")]
    assert calibrate_command.main([str(folder / "m.onnx"), *data, *flags]) == 0
    assert function.call_args.args[2].labels.tolist() == [0, 1, 2]
    return str(function.call_args.args[1]), options_of(function)


def test_calibrate(monkeypatch, tmp_path):
    output, options = calibrated(monkeypatch, tmp_path)
    assert output == str(tmp_path / "m-sets.onnx")
    assert options == {
        "alpha": 0.1, "score": Score("lac", 0.01, 5), "rule": "marginal", "temperature": None, "report_share": 0.5,
        "seed": 0, "batch_size": 32, "force": False, "device": "auto",
    }  # fmt: skip
    flags = "-o n.onnx --alpha 0.2 --score raps --penalty 0.1 --k-reg 3 --rule per-class --temperature 2"
    more = "--report-share 0.4 --seed 7 --batch-size 8 --force --device cpu"
    output, options = calibrated(monkeypatch, tmp_path, *flags.split(), *more.split())
    assert output == "n.onnx"
    assert options == {
        "alpha": 0.2, "score": Score("raps", 0.1, 3), "rule": "per-class", "temperature": 2.0, "report_share": 0.4,
        "seed": 7, "batch_size": 8, "force": True, "device": "cpu",
    }  # fmt: skip
