"""``verify``: on the file alone, on files that were tampered with, on files of others, and as a command."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest

from tests.system_calls import Calls
from topk_export import ModelFileError, graph, verify_file
from topk_export.commands import export as export_command
from topk_export.commands import triton as triton_command
from topk_export.commands import verify as verify_command
from topk_export.commands.common import say
from topk_export.nodes import add_sets, digest_of_table
from topk_export.runtime.metadata import SET_OUTPUTS, Metadata
from topk_export.verify import Check, _check_against_sample
from topk_registry.conformal import PredictionSets, Score

N = 12
ALPHAS = (0.01, 0.1, 0.3)


@pytest.fixture
def copied(export, tmp_path):
    """The exported file alone, without the files beside it."""
    path = export(N, k=3, temperature=0.5, class_names=tuple("abcdefghijkl"))
    return shutil.copy(path, tmp_path / "copy.onnx")


def calibrated(path, score="lac", per_class=False):
    """Add prediction sets with thresholds that nobody measured."""
    model = graph.load(path)
    limits = {"lac": (4.6, 2.3, 1.2), "aps": (0.99, 0.8, 0.5), "raps": (1.02, 0.8, 0.5)}[score]
    table = np.asarray(limits)[:, None] * (1 + 1e-3 * np.arange(N)[None] if per_class else 1.0)
    sets = PredictionSets(Score(score), ALPHAS, table, 0.1)
    built = add_sets(model, sets)
    metadata = Metadata.from_props({entry.key: entry.value for entry in model.metadata_props})
    facts = {
        "score": score,
        "options": sets.score.options,
        "rule": sets.rule,
        "alpha": 0.1,
        "alphas": list(ALPHAS),
        "temperature": 1.0,
        **digest_of_table(sets),
    }
    outputs = {**metadata.outputs, **SET_OUTPUTS}
    graph.set_metadata(built, dataclasses.replace(metadata, sets=facts, outputs=outputs).to_props())
    onnx.save(built, str(path))
    return path


def changed(path, change):
    model = onnx.load(str(path))
    change(model)
    onnx.save(model, str(path))
    return path


def test_the_file_alone_is_enough(copied):
    report = verify_file(copied)
    assert report["passed"]
    assert any("copy.sample.npz" in line for line in report["not_verified"])
    assert not [check for check in report["checks"] if check["name"].startswith("logits against torch")]


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("per_class", [False, True], ids=["marginal", "per-class"])
def test_prediction_sets_are_recomputed(copied, score, per_class):
    report = verify_file(calibrated(copied, score, per_class))
    assert [check for check in report["checks"] if not check["passed"]] == []
    names = {check["name"] for check in report["checks"]}
    assert {"prediction sets", "thresholds are those of the calibration", "set_size counts the set"} <= names
    assert any("coverage" in line for line in report["not_verified"])


def edit_props(model, **changes):
    for entry in model.metadata_props:
        if entry.key in changes:
            change = changes[entry.key]
            entry.value = json.dumps(change(json.loads(entry.value)) if callable(change) else change)


def test_a_temperature_that_is_not_the_graphs(copied, capsys):
    changed(copied, lambda model: edit_props(model, temperature=0.7))
    assert verify_command.main([str(copied)]) == 1
    assert "FAIL marginals (model)" in capsys.readouterr().out


def test_the_tolerance_of_logits_follows_torchs_own_error(predictor):
    logits = np.random.default_rng(0).standard_normal((5, 12))

    def check(off: float, error: float, dtype: str = "fp32") -> Check:
        metadata = dataclasses.replace(predictor.metadata, dtype=dtype)
        return _check_against_sample("logits", logits * (1 + off), logits, error, metadata, 1, 5)

    assert check(0, 0).passed
    assert not check(1e-3, 0).passed
    assert check(1e-3, 1e-3).passed
    limit = 4 * 2.0**-11 * 2**0.5
    assert check(0.8 * limit, 0, "fp16").passed
    assert not check(1.2 * limit, 0, "fp16").passed  # errors are measured over the spread of the logits


def test_files_that_are_not_models(tmp_path, capsys):
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    for path, message in ((text, "is not an ONNX model"), (tmp_path / "none.onnx", "does not exist")):
        with pytest.raises(ModelFileError, match=message):
            verify_file(path)
        assert verify_command.main([str(path)]) == 2
        assert message in capsys.readouterr().err


def test_the_command_needs_no_torch_and_writes_a_report(copied, tmp_path):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'timm', 'torchvision']))\n"
        f"from topk_registry.cli.main import main; "
        f"raise SystemExit(main(['verify', {str(copied)!r}, '--json', {str(tmp_path / 'report.json')!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "ok   marginals (head, flat)" in result.stdout
    assert "not verified: GPU" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is True


def test_the_report_is_put_in_place_whole(copied, monkeypatch):
    report = copied.with_name("report.json")
    calls = Calls(monkeypatch)
    assert verify_command.main([str(copied), "--json", str(report)]) == 0
    calls.check_written(report)


def test_the_sample_of_another_export(copied, capsys):
    np.savez(copied.with_name("other.npz"), x=np.zeros(3))
    assert verify_command.main([str(copied), "--sample", str(copied.with_name("other.npz"))]) == 2
    assert "is not a sample of an export" in capsys.readouterr().err
    np.save(copied.with_name("other.npy"), np.zeros(3))
    copied.with_name("empty.npz").touch()
    for name in ("other.npy", "empty.npz"):
        with pytest.raises(ModelFileError, match="is not a sample of an export"):
            verify_file(copied, sample=copied.with_name(name))


@pytest.mark.slow
def test_the_export_command(tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"class {i}" for i in range(N)))
    arguments = ["test_resnet", str(tmp_path / "m.onnx"), "-k", "3", "--num-classes", str(N)]
    options = ["--class-names", str(names), "--input-size", "3", "32", "32"]
    assert export_command.main([*arguments, *options, "--random-weights"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "m.onnx")
    assert "weights: random" in captured.err
    assert (tmp_path / "m.labels.txt").read_text().startswith("class 0\n")
    assert triton_command.main([str(tmp_path / "m.onnx"), str(tmp_path / "models")]) == 0
    assert (tmp_path / "models" / "m" / "1" / "model.onnx").is_file()
    assert verify_command.main([str(tmp_path / "m.onnx")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.pth"], "none.pth does not exist"),
        (["no_such_model"], "neither a file or folder nor a model"),
        (["test_resnet"], "--random-weights"),
        (["test_resnet", "--random-weights", "-k", "12", "--num-classes", "12"], "k must be an integer"),
        (["test_resnet", "--random-weights", "--class-names", "none.txt"], "class names cannot be read"),
        (["test_resnet", "--random-weights", "--model-kwargs", "depth=3"], "test_resnet cannot be built: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_of_the_export_command_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert export_command.main(arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not list(tmp_path.iterdir())


def test_terminal_codes_of_names_are_escaped(capsys):
    say("a\x1b[31m\tb\x07\nö\u202e")
    assert capsys.readouterr().err == "a\\x1b[31m\\tb\\x07\nö\\u202e\n"


def test_commands_have_at_most_25_flags():
    flags = [action for action in export_command._parser()._actions if action.option_strings]
    assert len(flags) <= 25
