"""The report's text: one well-formed page that needs nothing else, with every number, and no markup but its own."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from tests.studies.pages import HOSTILE, SHOWN, sections
from topk_studies.engine.study import Findings, Section
from topk_studies.report.html import page, write_html

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Elements in order, with their text; an element that is not closed where it should be is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> is out of place"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def text() -> str:
    return page(sections())


@pytest.fixture(scope="module")
def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def attributes(read: Reader, name: str) -> Iterator[str]:
    return (value for _, attrs in read.elements if (value := attrs.get(name)) is not None)


@pytest.mark.slow
def test_it_is_well_formed(read: Reader) -> None:
    assert read.open == []
    assert [tag for tag, _ in read.elements[:2]] == ["html", "head"]
    assert read.elements[0][1] == {"lang": "en"}


def test_every_number_stands_in_it(read: Reader) -> None:
    words = "".join(read.words)
    assert [number for number in SHOWN if number not in words] == []


def test_names_are_text_and_never_markup(read: Reader) -> None:
    assert [tag for tag, _ in read.elements if tag == "script"] == []
    assert not [attrs for _, attrs in read.elements if any(name.startswith("on") for name in attrs)]
    assert "".join(read.words).count(HOSTILE) >= 9


def test_it_needs_no_other_file(read: Reader, text: str) -> None:
    links = [*attributes(read, "src"), *attributes(read, "href"), *attributes(read, "xlink:href")]
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_ids_are_unique_and_links_arrive(read: Reader) -> None:
    ids = list(attributes(read, "id"))
    assert len(ids) == len(set(ids))
    inside = {link[1:] for link in attributes(read, "href") if link.startswith("#")}
    assert {"noise", "small-data", "studies"} <= inside
    assert inside <= set(ids)
    named = {name for value in attributes(read, "aria-labelledby") for name in value.split()}
    assert named <= set(ids)


def test_headings_do_not_skip_a_level(read: Reader) -> None:
    levels = [int(tag[1]) for tag, _ in read.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))


def test_tables_have_headers_with_scope_and_pictures_have_words(read: Reader) -> None:
    scopes = [attrs.get("scope") for tag, attrs in read.elements if tag == "th"]
    assert set(scopes) == {"col", "row"}
    assert scopes.count("row") == 4
    pictures = [attrs for tag, attrs in read.elements if tag == "img" or attrs.get("role") == "img"]
    assert [attrs.get("alt") or attrs.get("aria-label") for attrs in pictures] == [
        "Two lines.",
        "Noise. Too intricate.",
    ]


def test_the_best_is_marked_only_where_the_intervals_are_apart(text: str) -> None:
    assert re.findall(r'<td class="number best">([^<]*)</td>', text) == ["90.80 ± 0.25"]
    assert '<td class="number paper">76.68</td>' in text


def test_claims_are_counted_and_those_beyond_the_papers_told_apart(read: Reader) -> None:
    words = "".join(read.words)
    assert "2 studies, 2 runs. 1 run failed" in words
    assert "Of 3 claims of the papers, 1 agrees, 1 differs, 1 stays open." in words
    assert "Holds. Beyond the paper: It is exact." in words


def test_a_failed_run_is_shown_with_its_reason(read: Reader) -> None:
    words = "".join(read.words)
    assert f"loss = {HOSTILE}: ValueError: {HOSTILE}" in words
    assert "Traceback\n  a line" in words


def test_commands_versions_and_machine_are_told(read: Reader) -> None:
    words = "".join(read.words)
    for told in ("topk-registry study noise", "--budget paper", "2.15.0", "x86_64, 2 cores", "80 s", "2026-01-02"):
        assert told in words


def test_an_intricate_figure_is_a_png_within_the_page(text: str) -> None:
    assert text.count("<svg") == 1
    assert text.count('src="data:image/png;base64,') == 1


def test_a_report_without_studies_is_a_page(tmp_path) -> None:
    write_html([], tmp_path / "report.html")
    assert "0 studies, 0 runs." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_study_without_findings_has_its_question(text: str) -> None:
    empty = page([Section("a b", "Title", "Why?", "Someone", Findings(), ())])
    assert '<section class="study" id="a-b"' in empty
    assert "Why?" in empty
    assert "<h3>" not in empty
