"""The committed account of the small budget: whole, and quoted as it is."""

import json
from pathlib import Path

import pytest

from topk_studies.engine.catalogue import PAPERS
from topk_studies.report.account import claims, main, update

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def summaries():
    return json.loads((RESULTS / "studies.json").read_text())


def test_every_study_is_there_and_none_failed(summaries):
    assert [summary["study"] for summary in summaries] == list(PAPERS)
    assert not any(summary["failed"] for summary in summaries)
    assert all(summary["runs"] for summary in summaries)


def test_the_account_quotes_the_report(summaries):
    text = (RESULTS / "studies.md").read_text()
    assert update(text, summaries) == text
    assert claims(summaries) in text


def test_a_papers_figure_has_a_column_of_its_own(summaries):
    note = {"claim": "A beats B.", "verdict": "same", "evidence": "+0.10", "paper": "+4.35"}
    text = claims([{**summaries[0], "notes": [note, {**note, "paper": ""}]}])
    assert "| claim | the paper |  | what was measured |\n|---|---|---|---|\n" in text
    assert "| A beats B. | +4.35 | no difference | +0.10 |\n| A beats B. |  | no difference | +0.10 |" in text


def test_the_account_and_what_it_quotes_are_written_by_one_command(summaries, tmp_path):
    whole = tmp_path / "summary.json"
    whole.write_text(json.dumps([{**summary, "tables": [], "protocol": "as above"} for summary in summaries]))
    text = tmp_path / "studies.md"
    text.write_text("<!-- claims -->\nold\n<!-- /claims -->\n")
    assert main([str(whole), str(text)]) == 0
    assert text.read_text() == f"<!-- claims -->\n{claims(summaries)}<!-- /claims -->\n"
    assert (tmp_path / "studies.json").read_text() == (RESULTS / "studies.json").read_text()
