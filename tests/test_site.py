"""The site builds without a warning and without a network, and has a page for each loss."""

import functools
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import topk_registry as tr
from tests.browser import chromium, complaints, window
from topk_registry.registry.api import losses

pytest.importorskip("furo", reason="the site needs the extra docs")
ROOT = Path(__file__).parents[1]


class Addresses(HTMLParser):
    """Every address that a page loads or links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        source, address = found.get("src"), found.get("href")
        if tag in ("script", "img") and source:
            self.loaded.append(source)
        if tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.append(address or "")
        if tag == "a" and address:
            self.linked.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    source = tmp_path_factory.mktemp("site")
    built = shutil.ignore_patterns("_build", ".jupyter_cache", "jupyter_execute")  # notebooks run on today's code
    shutil.copytree(ROOT / "docs", source / "docs", ignore=built)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(source / "docs"), str(source / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "html"


@pytest.mark.slow
def test_every_loss_has_a_page_with_its_picture_and_its_options(site):
    ours = [name for name in tr.list_losses() if tr.loss_info(name).distribution == "topk-registry"]
    assert len(ours) >= 17
    for name in ours:
        page = (site / "generated" / "losses" / f"{name}.html").read_text()
        assert f"timm train --loss {name}" in re.sub(r"<[^>]*>", "", page)
        assert "Parameters" in page
        assert "Use it when" in page
        assert "Take another when" in page
        assert "Use when" not in page
        assert "tried when tuned" in page or "None of its own" in page
        if isinstance(builder := tr.get_loss_builder(name), type) and issubclass(builder, tr.BatchLoss):
            continue  # it has no value at a single row
        assert f"{name}.svg" in page
        assert (site / "_images" / f"{name}.svg").stat().st_size > 1000
        assert (site / "_images" / f"{name}-levels.png").stat().st_size > 1000


PHONE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="{static}/site.css">
<style>body {{ margin: 1rem; font: 16px sans-serif }} h1 {{ font-size: 2.5em }} .table-wrapper {{ overflow-x: auto }}
td {{ min-width: 200px }}</style>
<div role="main"><h1>topk_registry.distributions</h1>
<h2>Serve <code class="literal"><span class="pre">timm</span> <span class="pre">--class-parallel</span></code></h2>
<div class="table-wrapper container"><table><tr><td>one<td>two<td>three</table></div>
<div class="wide-picture container"><img class="loss-picture" src="data:image/svg+xml,{svg}"></div></div>
<script src="{static}/tables.js"></script>"""


SVG = "%3Csvg xmlns='http://www.w3.org/2000/svg' width='640' height='20'/%3E"
SCROLLERS = {".table-wrapper": "Table, scrolls sideways", ".wide-picture": "Picture, scrolls sideways"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_names_fit_their_line_and_what_is_wide_says_that_it_scrolls(tmp_path, scheme):
    wait = pytest.importorskip("selenium.webdriver.support.ui")
    page = tmp_path / "page.html"
    page.write_text(PHONE.format(static=(ROOT / "docs" / "_static").as_uri(), svg=SVG))
    with chromium() as browser:
        for width, scrolls in ((360, 2), (1100, 0)):
            with window(browser, width, scheme=scheme):
                browser.get(page.as_uri())
                wait.WebDriverWait(browser, 10).until(
                    lambda page, wanted=scrolls: len(page.find_elements("css selector", ".scrolls")) == wanted
                )
                for place, label in SCROLLERS.items():
                    box = browser.find_element("css selector", place)
                    assert box.get_attribute("aria-label") == (label if scrolls else None)
                    assert (box.get_attribute("tabindex") == "0") == bool(scrolls)
                for heading in browser.find_elements("css selector", "h1, h2"):
                    assert heading.get_property("scrollWidth") <= heading.get_property("clientWidth")
                flag = browser.find_elements("css selector", "h2 .pre")[1]
                assert browser.execute_script("return arguments[0].getClientRects().length", flag) == 1
                assert browser.execute_script("return document.documentElement.scrollWidth") <= width
                assert not complaints(browser)


def test_pages_load_the_script_that_finds_wide_tables():
    spec = (ROOT / "docs" / "conf.py").read_text()
    assert '"tables.js"' in spec
    assert ".scrolls" in (ROOT / "docs" / "_static" / "site.css").read_text()


@pytest.mark.parametrize("page", ["guide/choose.md", "results/features.md", "results/images.md"])
def test_a_picture_with_small_letters_may_scroll(page):
    text = (ROOT / "docs" / page).read_text()
    assert re.search(r":::\{container\} wide-picture\n```\{image\} \.\./generated/pictures/(decision|claims_)", text)


@pytest.fixture
def generated_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return pytest.importorskip("generated_pages")


def bare(scale: float = 2.0):
    return lambda logits, target: scale * logits.logsumexp(-1).mean()


def told(scale: float = 2.0, num_classes: int = 3):
    """Logsumexp, scaled.

    Use when:
        You test ``told``
        pages.
    """
    return bare(scale)


vars(told).update(option_ranges={"scale": "(0, inf)"}, tuning_grid={"scale": (1.0, 4.0)})


@pytest.mark.parametrize(
    ("builder", "shown", "missing"),
    [
        (bare, ["| `scale` | `2.0` | see below | - |", "tests.test_site.bare"], ["Use it when"]),
        (
            told,
            [
                "Logsumexp, scaled.",
                "**Use it when** you test `told` pages.",
                "| `scale` | `2.0` | `(0, inf)` | `1.0`, `4.0` |",
                "| `num_classes` | the trainer tells it |",
            ],
            ["Take another when"],
        ),
        (functools.partial(bare, scale=3.0), ["| `scale` | `3.0` |"], ["Use it when"]),
    ],
)
def test_a_loss_of_somebody_else_has_a_page_with_what_it_declares(builder, shown, missing, generated_pages):
    tr.register_loss("somebodys")(builder)
    try:
        page = generated_pages.loss_page("somebodys", None, "")
    finally:
        losses.unregister("somebodys")
    assert page.startswith("# somebodys\n")
    assert "timm train --loss somebodys\n" in page
    assert [text for text in shown if text not in page] == []
    assert [text for text in [*missing, "Paper"] if text in page] == []


def test_public_names_stand_by_task_and_errors_last(generated_pages):
    page = "".join(generated_pages.api_page())  # which refuses a name that has no task
    tasks = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert tasks[-2:] == ["Errors", "Names of version 0.1"]
    assert page.index("topk_registry.create_loss") < page.index("topk_registry.TopKHead")
    train = re.findall(
        r"^.. auto\w+:: topk_registry.train.(\w+)", "".join(generated_pages.namespace_page("train")), re.M
    )
    assert train[-1] == "TrainError"


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere_and_their_links_lead_somewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        found = Addresses(page.read_text())
        assert not [address for address in found.loaded if "//" in address], page
        for address in found.linked:
            path, _, anchor = address.partition("#")
            if "//" in path or path.startswith("mailto:"):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page}: {address}"
            if anchor and target.suffix == ".html":
                assert f'id="{anchor}"' in target.read_text(), f"{page}: {address}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")))
def test_notebooks_were_run_and_show_what_they_drew(site, name):
    page = (site / "tutorials" / f"{name}.html").read_text()
    source = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
    cells = source.count("```{code-cell}")
    hidden = page.count("the page's sentences hold in this run")
    assert cells > 4
    assert page.count('class="cell docutils') == cells - 1  # one checks the sentences, unseen
    assert not hidden
    assert ("/_images/" in page) == ("plt." in source)
    assert page.count("output stream") >= 2
    assert "Traceback" not in page
    assert "stderr" not in page


@pytest.mark.slow
def test_programs_that_read_find_every_page(site):
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) > 30
    assert "guide/start.html" in listed
    assert all((site / page).exists() for page in listed)


@pytest.mark.slow
def test_the_gallery_has_the_pictures_of_its_commands(site):
    assert (site / "_images" / "scores.png").stat().st_size > 1000
    assert (site / "_images" / "levels.png").stat().st_size > 1000
