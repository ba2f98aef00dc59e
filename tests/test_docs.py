"""Documentation is true: links lead somewhere, Python blocks run, commands use flags that exist."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import types
from fractions import Fraction
from functools import cache
from math import ceil
from pathlib import Path

import pytest

import topk_registry as tr
from tests import needs
from topk_registry.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not {"generated", "_build", "jupyter_execute"} & set(page.parts)]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINKED = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
LINKED += [page for folder in ("topk_registry", "plugins", "export") for page in (ROOT / folder).rglob("*.md")]
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>python|sh)\n(?P<code>.*?)^```", re.M | re.S)
WORDS = 18_000  # of prose on all pages


def blocks(language: str) -> list[tuple[str, str, str]]:
    """Return (page, mark, code) of each fenced block of a language."""
    found = []
    for page, name in zip(PAGES, NAMES, strict=True):
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if match["language"] == language:
                found.append((name, match["mark"] or "", match["code"]))
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith(("mailto:", "#")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve()
        if "/generated/" in target:  # made with the site
            continue
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}, headings are {sorted(slugs)}"


FOLDERS = r"(?:\.ci|\.github|benchmarks|docs|export|plugins|tests|topk_registry)"


@pytest.mark.parametrize("page", ["status.md", "how_checked.md"])
def test_files_that_are_named_as_evidence_exist(page):
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    named = re.findall(rf"`({FOLDERS}/[^`]*)`", text)
    assert [file for file in named if not (ROOT / file).exists()] == []
    assert len(named) > 10


def test_each_configuration_names_its_test():
    text = (ROOT / "docs" / "reference" / "status.md").read_text(encoding="utf-8")
    for line in text[text.index("|---") :].splitlines()[1:]:
        state, evidence = line.split(" | ")[1:3]
        assert "`" in evidence or state.startswith("Untested"), line


RUN = [(name, code) for name, mark, code in blocks("python") if mark == "run" or name == "README.md"]


@pytest.mark.parametrize(("name", "code"), RUN, ids=[f"{i}-{name}" for i, (name, _) in enumerate(RUN)])
def test_python_blocks_run(name, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("block")  # importable, so that classes of the block can be pickled
    monkeypatch.setitem(sys.modules, "block", module)
    exec(compile(code, name, "exec"), vars(module))


def test_every_python_block_compiles():
    for name, _, code in blocks("python"):
        compile(code, name, "exec")


FROM = re.compile(r"<!-- from: (\S+) -->\n```python\n(.*?)^```", re.M | re.S)


def test_parts_of_programs_are_in_the_programs():
    """The lines of a block stand in the program in this order, apart from the indentation."""
    seen = 0
    for page, name in zip(PAGES, NAMES, strict=True):
        for program, code in FROM.findall(page.read_text(encoding="utf-8")):
            rest = iter(line.strip() for line in (page.parent / program).read_text(encoding="utf-8").splitlines())
            for line in filter(None, map(str.strip, code.splitlines())):
                assert line in rest, f"{name}: {program} has no line {line!r} after the lines before it"
            seen += 1
    assert seen >= 6


@cache
def flags_of(command: str) -> set[str]:
    """Return the flags that a command's help names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help-all" if command == "train" else "--help"])
    return set(re.findall(r"--[a-z][\w-]*", printed.getvalue()))


COMMAND = re.compile(r"^(?:timm|topk-registry|python -m topk_registry) ([a-z-]+)(.*)$")
# a study also takes the flags of `timm train`, and a script has its own
ELSEWHERE = {"study", "run"}


def test_commands_use_flags_that_exist():
    seen = 0
    for name, _, code in blocks("sh"):
        for line in code.replace("\\\n", " ").splitlines():
            match = COMMAND.match(line.partition(" #")[0].strip())
            if not match or match[1] in ELSEWHERE:
                continue
            words = shlex.split(match[2], comments=True)
            used = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help", "--help-all"}
            assert used <= flags_of(match[1]), f"{name}: {line}: {sorted(used - flags_of(match[1]))}"
            seen += 1
    assert seen > 20


def prose_words(text: str) -> int:
    """Count the words outside code, output and tables."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    return sum(len(line.split()) for line in text.splitlines() if not line.lstrip().startswith("|"))


def test_the_prose_of_the_pages_stays_short():
    assert sum(prose_words(page.read_text(encoding="utf-8")) for page in PAGES) <= WORDS
    assert prose_words((ROOT / "README.md").read_text()) <= 400
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


def test_the_readme_counts_the_losses():
    readme = (ROOT / "README.md").read_text()
    names = [name for name in tr.list_losses() if tr.loss_info(name).distribution == "topk-registry"]
    assert f"| {len(names)} losses for" in readme
    for_topk = [name for name in names if "topk" in name or name == "lapsum"]
    assert int(re.search(r"^\| topk_registry [\d.]+ \| (\d+) \|", readme, re.M)[1]) == len(for_topk)


def pages_by_setup() -> list[list[Path]]:
    """Return the pages with outputs, those with the same first setup together. The gate types the quickstart."""
    found: dict[str, list[Path]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if "<!-- show" in text and page.name != "quickstart.md":
            setup = re.search(r"<!-- setup\n(.*?)-->", text, re.S)
            found.setdefault(setup[1] if setup else page.name, []).append(page)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("pages", pages_by_setup(), ids=lambda pages: " ".join(page.stem for page in pages))
def test_pages_show_what_commands_print(pages):
    """The marked blocks run; their output differs from the page in numbers only."""
    command = [sys.executable, str(ROOT / "docs" / "transcripts.py"), "--check", *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_quickstart_learns():
    """The output on the page, which the gate repeats, is far from the accuracy of guesses among ten classes."""
    page = (ROOT / "docs/quickstart.md").read_text()
    assert float(re.search(r"^top-1 +([\d.]+) %", page, re.M)[1]) > 50


def test_the_factors_of_numba_are_those_of_the_file():
    """The table has one significant digit of the time without numba divided by the time with numba."""
    page = (ROOT / "docs/install.md").read_text()
    names, factors = (
        re.findall(r"^\| " + head + r" \| (.*) \|$", page, re.M)[0].split(" | ") for head in ("Loss", "Factor")
    )
    rows = json.loads((ROOT / "docs/results/kernels.json").read_text())["rows"]
    found = {row["loss"]: f"about {float(format(1 / row['ratio'], '.1g')):.0f}" for row in rows}
    assert {name.strip("`"): factor for name, factor in zip(names, factors, strict=True)} == {
        name: found[name] for name in ("smooth_topk_svm", "topk_nll", "noised_topk", "noised_topk_imbalanced")
    }


def test_the_table_of_calibration_images_follows_from_the_beta_distribution():
    """The coverage for N calibration scores is Beta(j, N + 1 - j) distributed, with j = ceil((N + 1)(1 - alpha))."""
    beta = needs.package("scipy.stats").beta
    table = (
        (ROOT / "docs/prediction_sets.md").read_text().partition("<!-- coverage -->")[2].strip().partition("\n\n")[0]
    )
    rows = [[float(x) for x in re.findall(r"[\d.]+", line)] for line in table.splitlines()[2:]]
    assert len(rows) >= 5
    for images, count, *ranges in rows:
        fits = images / 5 if images >= 500 else 0  # images that fit the temperature; half of the rest is for the report
        assert count == (images - fits) / 2
        for alpha, found in ((Fraction(1, 10), ranges[:2]), (Fraction(1, 20), ranges[2:])):
            j = ceil((int(count) + 1) * (1 - alpha))
            assert found == pytest.approx(100 * beta(j, count + 1 - j).ppf([0.05, 0.95]), abs=0.051)


def test_the_citation_on_the_page_is_that_of_the_file():
    page = (ROOT / "docs/reference/stability.md").read_text().replace("\\_", "_")
    cited = dict(re.findall(r"^  (\w+) = \{(.*?)\},?$", page, re.M))
    file = dict(re.findall(r"^(title|version|license|abstract): (.*)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert cited["version"] == file["version"]
    assert cited["license"] == file["license"]
    assert cited["title"] == f"{file['title']}: {file['abstract'][0].lower()}{file['abstract'][1:].rstrip('.')}"
