"""A new distribution has its own names everywhere, and nothing of the template's."""

import re
import sys
from datetime import date
from pathlib import Path

import pytest

from topk_registry.cli import main as cli
from topk_registry.cli import new_plugin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEMPLATE = Path(__file__).parents[2] / "plugins/template"


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_names_are_filled_in(tmp_path, capsys):
    made = tmp_path / "My_Brier -Losses"
    assert cli.main(["new-plugin", str(made)]) == 0
    out = capsys.readouterr().out
    assert ("created my-brier-losses in" in out, f"\n  cd '{made}'\n" in out) == (True, True), out
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert project["name"] == "my-brier-losses"
    assert project["authors"] == [{"name": "the my-brier-losses authors"}]
    assert project["entry-points"]["topk_registry.losses"]["my_brier"].startswith("my_brier_losses")
    assert f"Copyright (c) {date.today().year} the my-brier-losses authors" in (made / "LICENSE").read_text()
    for path in files(made):
        assert not re.search(r"\bgce", path + (made / path).read_text(), re.IGNORECASE)


def test_the_templates_own_names_give_the_template(tmp_path):
    new_plugin.make(tmp_path / "same", name="gce-loss", loss="gce")
    for path in files(tmp_path / "same"):
        year = re.sub(r"\(c\) \d{4}", f"(c) {date.today().year}", (TEMPLATE / path).read_text())
        assert (tmp_path / "same" / path).read_text() == year


def test_links_work_wherever_it_is_copied():
    links = re.findall(r"\]\(([^)]+)\)", (TEMPLATE / "README.md").read_text())
    for link in links:
        assert (TEMPLATE / link).resolve().is_relative_to(TEMPLATE.resolve())
        assert (TEMPLATE / link).is_file()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["9lives"], "lower-case words with hyphens"),
        (["topk-plugins"], "already a package 'topk_plugins'"),
        (["torch"], "already a package 'torch'"),
        (["class"], "keyword"),
        (["x", "--loss", "My"], "argument --loss: expected lower-case words"),
        (["focal"], "already a loss 'focal' of topk-registry"),
        (["x", "--loss", "ce"], "already a loss 'ce' of timm"),
        (["full"], "exists and is not empty"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, argv, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(SystemExit):
        cli.main(["new-plugin", *argv])
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"full"}
