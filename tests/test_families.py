"""The command that exports and verifies one model per family: families, failures, and continued runs."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import families

DOCS = Path(__file__).parents[1] / "docs"


def test_the_families_are_those_of_timm_and_torchvision():
    found = families.families()
    assert sum(name.startswith("timm/") for name in found) > 90
    assert "torchvision:resnet18" in found["torchvision/resnet"]
    assert "resnet18" in found["timm/resnet"]


@pytest.mark.slow
def test_the_smallest_of_the_models_is_chosen():
    assert families.smallest(["resnet26", "resnet10t", "resnet18"]) == ("resnet10t", 5_435_488)


@pytest.mark.nightly
def test_a_family_is_verified():
    result = families.check("timm/mobilenetv3")
    assert result["status"] == families.VERIFIED, result
    assert result["checks"] > 90


def test_a_family_that_fails_has_a_reason(monkeypatch):
    def broken(names):
        raise RuntimeError("no such layer\nand more")

    monkeypatch.setattr(families, "smallest", broken)
    assert families.check("timm/resnet") == {"status": families.FAILED, "reason": "RuntimeError: no such layer"}


def test_a_crash_ends_one_family(monkeypatch):
    monkeypatch.setattr(families, "check", lambda family: os._exit(3))
    result = families.in_a_process("timm/resnet")
    assert result == {"status": families.FAILED, "reason": "the process ended with exit code 3"}


def test_a_second_run_continues_the_first(tmp_path, monkeypatch):
    file, seen = tmp_path / "families.json", []

    def checked(family):
        seen.append(family)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return {"status": families.VERIFIED}

    monkeypatch.setattr(families, "families", lambda: {"a": ["x"], "b": ["y"], "c": ["z"]})
    monkeypatch.setattr(families, "in_a_process", checked)
    with pytest.raises(KeyboardInterrupt):
        families.main(["--output", str(file)])
    assert list(json.loads(file.read_text())["families"]) == ["a"]
    families.main(["--output", str(file)])
    assert seen == ["a", "b", "b", "c"]
    families.main(["--output", str(file), "--only", "b"])
    assert seen[4:] == ["b"]
    content = json.loads(file.read_text())
    assert list(content["families"]) == ["a", "b", "c"]
    assert content["available"] == 3
    file.write_text(json.dumps({**content, "versions": {"timm": "0"}}))
    with pytest.raises(SystemExit, match="remove the file"):
        families.main(["--output", str(file)])


@pytest.mark.parametrize("page", ["export.md", "reference/how_checked.md"])
def test_the_pages_have_the_counts_of_the_file(page):
    """The pages also name each family that fails."""
    content = json.loads((DOCS / "results" / "families.json").read_text())
    text = (DOCS / page).read_text()
    assert families.summary(content) in text
    failed = [name for name, result in content["families"].items() if result["status"] != families.VERIFIED]
    assert all(f"`{name}`" in text for name in failed), failed


def test_an_unknown_family_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        families.main(["--output", str(tmp_path / "families.json"), "--only", "timm/none"])
    assert "timm/resnet" in capsys.readouterr().err
