"""A site of several versions: folders, the list that each knows, and the switcher in a browser without a network."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.browser import chromium, complaints

DOCS = Path(__file__).parents[1] / "docs"
PAGE = """<!doctype html><html data-content_root="{root}"><body>
{switcher}<script src="{root}_static/versions.js"></script><script src="{root}_static/switcher.js"></script>
</body></html>"""


@pytest.fixture(scope="module")
def versions():
    spec = importlib.util.spec_from_file_location("versions", DOCS / "versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(folder: Path, *pages: str) -> Path:
    """A site with the real switcher and these pages beside its index."""
    switcher = (DOCS / "_templates" / "sidebar" / "versions.html").read_text()
    for page in ("index.html", *pages):
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PAGE.format(root="../" * page.count("/") or "./", switcher=switcher))
    (folder / "_static").mkdir()
    for name in ("versions.js", "switcher.js"):
        (folder / "_static" / name).write_text((DOCS / "_static" / name).read_text())
    return folder


def listed(site: Path, name: str) -> list[dict]:
    text = (site / name / "_static" / "versions.js").read_text()
    return json.loads(text.removeprefix("window.SITE_VERSIONS = ").removesuffix(";\n"))


@pytest.fixture
def site(versions, tmp_path):
    for name, pages in (("v0.9", ["old.html"]), ("v0.10", ["guide/start.html"]), ("latest", ["guide/start.html"])):
        versions.put(tmp_path / "site", name, built(tmp_path / name, *pages))
    return tmp_path / "site"


def test_every_version_knows_all_of_them_the_newest_release_first(versions, site):
    assert versions.versions(site) == ["latest", "v0.10", "v0.9"]
    for name in ("latest", "v0.10", "v0.9"):
        assert [version["name"] for version in listed(site, name)] == ["latest", "v0.10", "v0.9"]
    assert listed(site, "latest")[1]["pages"] == ["guide/start.html", "index.html"]
    assert "url=v0.10/index.html" in (site / "index.html").read_text()
    assert (site / ".nojekyll").exists()


def test_a_version_is_replaced_whole_and_the_others_stay(versions, site, tmp_path):
    versions.put(site, "latest", built(tmp_path / "again", "new.html"))
    assert versions.pages(site / "latest") == ["index.html", "new.html"]
    assert versions.pages(site / "v0.9") == ["index.html", "old.html"]
    assert listed(site, "v0.9")[0]["pages"] == ["index.html", "new.html"]
    assert sorted(path.name for path in site.iterdir()) == [".nojekyll", "index.html", "latest", "v0.10", "v0.9"]


def test_the_front_page_leads_to_latest_before_there_is_a_release(versions, tmp_path):
    versions.put(tmp_path / "site", "latest", built(tmp_path / "built"))
    assert "url=latest/index.html" in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.parametrize("name", ["1.0", "v1.0rc1", "../v1", "main", ""])
def test_a_name_that_is_no_version_is_refused(versions, name, tmp_path, capsys):
    assert versions.main([str(tmp_path / "site"), name, str(built(tmp_path / "built"))]) == 1
    assert f"a version is latest or like v1.2.3, got {name!r}" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_a_folder_that_is_no_site_is_refused(versions, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert versions.main([str(tmp_path / "site"), "latest", str(tmp_path / "empty")]) == 1
    assert "holds no built site" in capsys.readouterr().err
    assert versions.main([]) == 2


@pytest.mark.slow
def test_the_switcher_leads_to_the_same_page_of_another_version(site):
    with chromium() as browser:
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import Select, WebDriverWait

        def choose(name):
            Select(browser.find_element(By.ID, "version-switcher")).select_by_visible_text(name)
            WebDriverWait(browser, 60).until(lambda b: f"/{name}/" in b.current_url)

        browser.get((site / "latest" / "guide" / "start.html").as_uri())
        choice = Select(browser.find_element(By.ID, "version-switcher"))
        assert [option.text for option in choice.options] == ["latest", "v0.10", "v0.9"]
        assert choice.first_selected_option.text == "latest"
        choose("v0.10")
        assert browser.current_url == (site / "v0.10" / "guide" / "start.html").as_uri()
        choose("v0.9")  # which has no such page
        assert browser.current_url == (site / "v0.9" / "index.html").as_uri()
        assert complaints(browser) == []


@pytest.mark.slow
def test_a_site_by_itself_shows_no_choice(tmp_path):
    with chromium() as browser:
        from selenium.webdriver.common.by import By

        browser.get((built(tmp_path / "alone") / "index.html").as_uri())
        assert not browser.find_element(By.ID, "version-switcher").is_displayed()
        assert complaints(browser) == []
