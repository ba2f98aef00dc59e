"""The pages for whoever carries on: their paths exist, the picture is current, workflows need no secret."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

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


# forms of links whose kind is known; the path without its leading slash
FORMS = {
    "arxiv.org": r"(abs|pdf)/\d{4}\.\d{4,5}(v\d+)?",
    "doi.org": r"10\.\d{4,9}/\S+",
    "github.com": r"[\w.-]+/[\w.-]+(/(tree|blob|issues|pull|releases)/\S+)?",
}
NAMES_ONLY = ("www.w3.org", "host")  # of XML, and of a reader's own service


def complaint(link: str) -> str:
    """What is wrong with an external link, as far as it can be told without asking; empty where nothing is."""
    try:
        parts = urlsplit(link)
        host = parts.hostname or ""
    except ValueError as error:
        return str(error)
    own = host in ("127.0.0.1", "localhost") or host.endswith("example.com")
    if own or host in NAMES_ONLY:
        return ""
    if parts.scheme != "https":
        return f"expected https, got {parts.scheme}"
    if not re.fullmatch(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}", host):
        return f"{host!r} is no host"
    if re.search(r"[\s<>\"{}|\\^`]", link):
        return "a character that a link must not have"
    path = parts.path.strip("/")
    form = FORMS.get(host.removeprefix("www.").removeprefix("dx."))
    if form and not re.fullmatch(form, path):
        return f"expected {form}, got {path}"
    return ""


def external_links() -> list[tuple[str, str]]:
    """Where, and the link: of Markdown's pages, docstrings and comments, the citation and the project's metadata."""
    found = []
    for page in [*PAGES, *(ROOT / "docs/results").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        found += [(label(page), link) for link in re.findall(r"\]\(<?([a-z]+://[^)]*)\)", text)]  # spaces are seen too
        found += [(label(page), link.rstrip(".,;:")) for link in re.findall(r"(?<!\()\b[a-z]+://[^\s)>\]`'\"]+", text)]
    for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *ROOT.glob("*/**/*.py")]:
        if ".venv" not in path.parts and path.relative_to(ROOT).parts[0] != "tests" and path.name != "conf.py":
            text = path.read_text(encoding="utf-8")
            found += [(label(path), link.rstrip(".,;:")) for link in re.findall(r"\bhttps?://\w[\w./~%#?=&+:-]*", text)]
    return found


def test_external_links_have_a_form_that_can_be_opened():
    links = external_links()
    assert len(links) > 20
    assert [f"{where}: {link}: {told}" for where, link in links if (told := complaint(link))] == []


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("https://arxiv.org/abs/1802.07595", ""),
        ("https://arxiv.org/pdf/1802.07595v2", ""),
        ("https://doi.org/10.1093/biomet/81.3.457", ""),
        ("https://github.com/huggingface/pytorch-image-models", ""),
        ("http://127.0.0.1:8000/predict", ""),
        ("https://arxiv.org/abs/180207595", "expected (abs|pdf)"),
        ("https://arxiv.org/1802.07595", "expected (abs|pdf)"),
        ("https://doi.org/biomet/81.3.457", "expected 10"),
        ("https://github.com/huggingface", "expected [\\w.-]+/"),
        ("http://arxiv.org/abs/1802.07595", "expected https"),
        ("ftp://pytorch.org/docs", "expected https"),
        ("https://pytorch/docs", "is no host"),
        ("https://pytorch.org/a page", "a character"),
        ("https://[pytorch.org/docs", "Invalid IPv6"),
    ],
)
def test_a_link_that_cannot_be_opened_is_found(link, told):
    assert told in complaint(link)
    assert bool(told) == bool(complaint(link))


def test_the_citation_names_papers_as_arxiv_does():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    names = [each["value"] for paper in citation["references"] for each in paper.get("identifiers", ())]
    assert len(names) == 4
    assert all(re.fullmatch(r"arXiv:\d{4}\.\d{4,5}", name) for name in names)


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


@pytest.mark.parametrize("workflow", [*WORKFLOWS, ROOT / "plugins/template/.github/workflows/ci.yaml"], ids=label)
def test_actions_are_pinned_to_commits(workflow):
    lines = workflow.read_text().splitlines()
    used = [line for line in lines if "uses: " in line]
    assert used
    for line in used:
        assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+$", line), line
    commits = re.findall(r"uses: ([\w./-]+)@([0-9a-f]{40})", "\n".join(lines))
    assert len({name for name, _ in commits}) == len(set(commits)), "one commit an action"


def test_the_recipe_for_conda_asks_for_what_the_package_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == project["version"]
    run = {re.sub(r"\s+", "", line).replace("pytorch>", "torch>") for line in recipe["requirements"]["run"]}
    assert {line for line in run if not line.startswith("python>")} == set(project["dependencies"])
    points = dict(line.split(" = ") for line in recipe["build"]["python"]["entry_points"])
    assert points == project["scripts"]


def test_tutorials_open_in_colab(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    colab = importlib.import_module("colab")
    for page in sorted((ROOT / "docs/tutorials").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        cells = json.loads(colab.notebook(text))["cells"]
        assert [cell["source"] for cell in cells if "%pip install" in cell["source"]] == [colab.INSTALL]
        assert sum(cell["cell_type"] == "code" for cell in cells) == text.count("```{code-cell}") + 1
        assert colab.notebook(text) == colab.notebook(text)
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/topk_registry")
    monkeypatch.setenv("GITHUB_REF_TYPE", "branch")
    source = ["---\na: b\n---\n\n# Title\n\nText\n"]
    colab.add_link(None, "guide/start", source)
    assert "colab" not in source[0]
    colab.add_link(None, "tutorials/first_steps", source)
    place = "https://colab.research.google.com/github/somebody/topk_registry/blob/gh-pages/latest"
    assert source[0] == f"---\na: b\n---\n\n# Title\n\n[Open in Colab]({place}/tutorials/first_steps.ipynb)\n\nText\n"
    monkeypatch.delenv("GITHUB_REPOSITORY")
    colab.add_link(None, "tutorials/first_steps", unchanged := ["# Title\n"])
    assert unchanged == ["# Title\n"]


def timm_flags():
    spec = importlib.util.spec_from_file_location("list_timm_flags", ROOT / "docs/list_timm_flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_flag_of_timms_is_ours_or_has_a_reason():
    flags = timm_flags()
    assert len(flags.known()) > 190
    assert {"model", "sched", "loss-class-weight", "stop-epoch"} < set(flags.known()) & flags.ours()
    found = flags.TABLE.search(flags.PAGE.read_text(encoding="utf-8"))
    assert found, "docs/guide/train.md has no <!-- timm's flags -->"
    assert found[0] == flags.table(), "run python docs/list_timm_flags.py"
    assert found[0].count("`--") == len(flags.lacking()) + 1  # --torchcompile is named besides


def test_flags_are_read_from_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "group.add_argument('-b', '--batch-size', type=int)\nparser.add_argument('data')\n"
        "group.add_argument('--kd', '--distill')\nprint('--other')\n"
    )
    assert timm_flags().flags_of(script) == ["batch-size", "kd", "distill"]


@pytest.mark.parametrize("group", ["naflex-loader", "train-img-sizes", "kd-model-name", "torchscript"])
def test_what_the_table_lists_is_refused(group, capsys):
    from topk_registry.train.config.arguments import create_parser, parse_args

    assert group in timm_flags().lacking()
    takes_value = next(a for a in create_parser()._actions if f"--{group}" in a.option_strings).nargs != 0
    with pytest.raises(SystemExit):
        parse_args(["x", f"--{group}", *["224"] * takes_value])
    assert f"--{group} is for timm's own training script" in capsys.readouterr().err
