"""``topk-registry compare``: a checkpoint, another, an exported file."""

import json

import pytest

from topk_registry.cli.main import main

pytestmark = pytest.mark.slow


def test_models_of_both_kinds_are_compared(runs, exported, image_folder, tmp_path, capsys):
    page, findings = tmp_path / "page.html", tmp_path / "found.json"
    argv = ["compare", runs["ce"], runs["smooth_topk_svm"], exported, "--data-dir", image_folder, "--k", "1", "2"]
    argv += ["--cache", tmp_path / "cache", "--workers", "0", "--page", page, "--json", findings, "--resamples", "300"]
    assert main(list(map(str, argv))) == 0
    printed = capsys.readouterr()
    assert "smooth_topk_svm (second) beside ce (first)" in printed.out
    assert "model.onnx (second) beside ce (first)" in printed.out
    found = json.loads(findings.read_text())
    assert found["models"] == ["ce", "smooth_topk_svm", "model.onnx"]
    assert found["images"] == 90
    export = {each["measure"]: each for each in found["comparisons"][1]["measures"]}
    assert export["top-1"]["verdict"] == "equivalent"
    assert export["log-likelihood"]["difference"] == pytest.approx(0, abs=1e-4)
    changed = found["comparisons"][0]
    for index in changed["gained"] + changed["lost"]:
        assert found["files"][str(index)].endswith(".png")
    text = page.read_text()
    assert "http:" not in text
    assert "https:" not in text
    if changed["gained"] + changed["lost"]:
        assert "data:image/jpeg;base64" in text
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_wrong_command_lines_are_told_in_a_line(runs, tmp_path, capsys):
    assert main(["compare", str(runs["ce"]), str(tmp_path / "none.onnx")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("topk-registry compare: there is no model file")
    with pytest.raises(SystemExit):
        main(["compare", str(runs["ce"])])
    assert "at least two models" in capsys.readouterr().err
