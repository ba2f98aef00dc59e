"""The report in a headless browser, from its file: seen, read on a phone and in the dark, and without a network."""

import json
import os
from pathlib import Path

import pytest

from tests.browser import chromium, complaints, window
from tests.studies.pages import sections
from topk_studies.report.html import write_html

CONTRAST = """
const linear = c => { c /= 255; return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; };
const light = colour => {
  const [r, g, b] = colour.match(/[0-9.]+/g).map(Number);
  return .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
};
const ground = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
  return "rgb(255, 255, 255)";
};
const faint = [];
const WORDS = "h1, h2, h3, h4, p, li, th, td, dt, dd, a, code, figcaption, span, svg text";
for (const e of document.querySelectorAll(WORDS)) {
  if (!e.textContent.trim()) continue;
  const own = getComputedStyle(e);
  const [a, b] = [light(e.closest("svg") ? own.fill : own.color), light(ground(e))].sort((x, y) => y - x);
  const ratio = (a + .05) / (b + .05);
  if (ratio < 4.5) faint.push([e.tagName, e.textContent.slice(0, 30), ratio]);
}
return faint;
"""
OVERFLOW = """
return [...document.querySelectorAll("body *")]
  .filter(e => !e.parentElement.closest(".scroll, pre, svg") && !e.closest(".skip"))
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.tagName + " " + e.textContent.slice(0, 40));
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(sections(), path)
    return path


@pytest.fixture
def page(browser, report):
    browser.get_log("performance")
    browser.get(report.as_uri())
    yield browser
    assert complaints(browser) == []
    assert browser.title == "Studies of top-k losses"  # no hostile name has run


def requested(browser) -> list[str]:
    """Addresses that the page has asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def test_nothing_is_asked_of_the_network(page, report) -> None:
    asked = requested(page)
    assert asked[0] == report.as_uri()
    assert [url for url in asked[1:] if not url.startswith("data:")] == []


def test_tables_and_figures_are_seen(page) -> None:
    boxes = page.execute_script(
        "return [...document.querySelectorAll('table, figure svg, figure img')]"
        ".map(e => [e.tagName, e.getBoundingClientRect().width, e.getBoundingClientRect().height])"
    )
    assert sorted(tag.lower() for tag, _, _ in boxes) == ["img", "svg", "table", "table"]
    assert all(width > 200 and height > 60 for _, width, height in boxes)
    assert page.execute_script("return document.querySelector('figure img').naturalWidth") > 500
    paths = "[...document.querySelectorAll('figure svg path')]"
    assert page.execute_script(f"return {paths}.filter(e => e.getBoundingClientRect().width > 50).length") > 5


def test_the_best_cell_has_its_star(page) -> None:
    star = page.execute_script("return getComputedStyle(document.querySelector('td.best'), '::after').content")
    assert "★" in star


def test_the_contents_lead_to_the_studies(page) -> None:
    for link in page.find_elements("css selector", "nav a"):
        link.click()
        target = link.get_attribute("href").rpartition("#")[2]
        top, height = page.execute_script(
            "return [document.getElementById(arguments[0]).getBoundingClientRect().top, innerHeight]", target
        )
        assert -1 <= top < height
        assert page.find_element("id", target).find_element("tag name", "h2").is_displayed()


@pytest.mark.parametrize("width", [390, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_its_window_and_can_be_read(page, width, scheme) -> None:
    with window(page, width, scheme=scheme):
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        assert page.execute_script(OVERFLOW) == []
        assert page.execute_script(CONTRAST) == []
        if folder := os.environ.get("SCREENSHOTS"):
            page.save_screenshot(f"{folder}/report-{width}-{scheme}.png")


def test_it_is_dark_in_the_dark(page) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        with window(page, 800, scheme=scheme):
            grounds.append(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 245, 242)", "rgb(22, 23, 26)"]


def test_what_is_wider_than_a_phone_scrolls_by_itself_and_by_keyboard(page) -> None:
    with window(page, 390):
        frames = page.execute_script(
            "return [...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth > e.clientWidth, e.tabIndex])"
        )
        assert any(wider for wider, _ in frames)
        assert {tab for _, tab in frames} == {0}


@pytest.mark.slow
def test_it_prints(page) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.execute_script(CONTRAST) == []
        printed = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
        assert len(printed) > 20_000
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
