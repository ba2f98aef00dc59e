"""The pages for whoever carries on: their paths exist, the picture is current, workflows need no secret."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/guide").glob("*.md"),
        *(ROOT / "docs/tutorials").glob("*.md"),
        *(ROOT / "plugins").glob("*/README.md"),
    }
)
PAGES += sorted((ROOT / "topk_registry").rglob("README.md"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_between_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    # pages under generated/ exist once the site is built; tests/test_site.py follows links to them
    links = [link for link in links if "://" not in link and "generated/" not in link]
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_they_name_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:topk_registry|plugins|export|tests|docs)/[\w./]*)`", text)
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_picture_of_the_rooms_is_current():
    spec = importlib.util.spec_from_file_location("draw_rooms", ROOT / "docs/draw_rooms.py")
    draw_rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_rooms)
    found = draw_rooms.PICTURE.search(draw_rooms.PAGE.read_text())
    assert found
    assert found[0] == draw_rooms.picture(), "run python docs/draw_rooms.py"


def test_the_page_of_architecture_has_every_room():
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [path.parent for path in (ROOT / "topk_registry").glob("*/__init__.py")]
    assert not [label(room) for room in rooms if f"`{label(room)}/`" not in text]


def test_the_citation_has_this_version_and_the_four_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert [paper["year"] for paper in citation["references"]] == [2018, 2022, 2016, 2022]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=label)
def test_no_workflow_needs_a_secret(workflow):
    text = workflow.read_text()
    assert yaml.safe_load(text)["jobs"]
    assert "secrets." not in text


def test_ci_runs_the_script_of_the_repository():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]
    commands = [step.get("run") for job in jobs.values() for step in job["steps"]]
    assert ".ci/run" in commands
    assert 'python -m pytest -n 2 -m "not slow"' in commands
