"""The committed report of the small budget: whole, and quoted as it is."""

import csv
import json
from pathlib import Path

import pytest

from topk_studies.engine.catalogue import STUDIES
from topk_studies.report.account import claims, update

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDER = RESULTS / "studies"


@pytest.fixture(scope="module")
def summaries():
    return json.loads((FOLDER / "summary.json").read_text())


def test_every_study_is_there_and_none_failed(summaries):
    assert [summary["study"] for summary in summaries] == list(STUDIES)
    assert not any(summary["failed"] for summary in summaries)
    assert all(summary["runs"] for summary in summaries)


def test_the_runs_are_those_of_the_summary(summaries):
    with open(FOLDER / "runs.csv") as file:
        rows = list(csv.DictReader(file))
    for summary in summaries:
        assert sum(summary["study"] in row["studies"].split() for row in rows) == summary["runs"]


def test_the_account_quotes_the_report(summaries):
    text = (RESULTS / "studies.md").read_text()
    assert update(text, summaries) == text
    assert claims(summaries) in text


def test_the_page_stands_alone_and_is_small():
    page = (FOLDER / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3_000_000
