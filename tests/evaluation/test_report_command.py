"""``topk-registry report`` and ``timm validate --report``."""

import json

import pytest

from topk_registry.cli.main import main

pytestmark = pytest.mark.slow


def test_a_model_has_a_report(runs, exported, image_folder, tmp_path, capsys):
    found = {}
    for model in (runs["ce"], exported):
        page, findings, groups = (tmp_path / name for name in ("page.html", "found.json", "groups.json"))
        argv = ["report", model, "--data-dir", image_folder, "--k", "1", "2", "--cache", tmp_path / "cache"]
        argv += ["--workers", "0", "--page", page, "--json", findings, "--superclasses", groups]
        assert main(list(map(str, argv))) == 0
        found[model] = json.loads(findings.read_text())
        assert "taken for each other" in capsys.readouterr().out
        assert found[model]["images"] == 90
        assert found[model]["worst"][0]["file"].endswith(".png")
        assert "data:image/jpeg;base64" in page.read_text()
        assert len(json.loads(groups.read_text())) == 6
    one, other = found.values()
    assert one["summary"] == pytest.approx(other["summary"], abs=1e-4)


def test_validate_writes_the_same_report(runs, tmp_path, capsys):
    argv = ["--workers", "0", "--topk", "1", "2"]
    checkpoint, page = runs["ce"] / "model_best.pth.tar", tmp_path / "page.html"
    assert main(["validate", "--checkpoint", str(checkpoint), "--report", str(page), *argv]) == 0
    printed = json.loads(capsys.readouterr().out.partition("--result\n")[2])
    findings = tmp_path / "found.json"
    cache = ["--cache", str(tmp_path / "cache"), "--json", str(findings), "--workers", "0", "--k", "1", "2"]
    assert main(["report", str(checkpoint), *cache]) == 0
    summary = json.loads(findings.read_text())["summary"]
    assert printed["top2"] == pytest.approx(100 * summary["top2"], abs=1e-3)
    assert printed["nll"] == pytest.approx(-summary["log_likelihood"], abs=1e-3)
    text = page.read_text()
    assert "data:image/jpeg;base64" in text
    assert f"{summary['smooth_calibration_error']:.4f}" in text
    assert f"{summary['brier']:.4f}" in text
    assert main(["validate", "--checkpoint", str(runs["ce"]), "--report", str(page), *argv]) == 2
    assert "--report is of one model" in capsys.readouterr().err
