"""The committed accounts: whole, quoted as they are, and as decided as they say."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from topk_registry import get_loss_builder
from topk_studies.engine.catalogue import OWN, PAPERS, load_study
from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.settings import TRIALS
from topk_studies.engine.statistics import LOOKS
from topk_studies.report import claims as pictured
from topk_studies.report import quotes
from topk_studies.report.account import VERDICTS, claims, main, update

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = ("features", "images", "studies")
DATA = {"features": "topk/ambiguous", "images": "topk/hierarchy", "studies": ""}  # of each page


def read(page):
    return json.loads((RESULTS / f"{page}.json").read_text())


@pytest.fixture(scope="module")
def summaries():
    return [summary for page in PAGES for summary in read(page)]


@pytest.fixture(scope="module")
def notes(summaries):
    return [(summary, note) for summary in summaries for note in summary["notes"]]


@pytest.mark.parametrize("page", PAGES)
def test_every_study_is_there_once_or_named_as_left_out_and_none_failed(page):
    summaries = read(page)
    left_out = (RESULTS / f"{page}.md").read_text().partition("\n## What was left out\n")[2]
    wanted = [name for name in (*PAPERS, *OWN) if isinstance(load_study(name), TrainingStudy) == bool(DATA[page])]
    there = [summary["study"] for summary in summaries]
    assert sorted(there) == sorted(set(there) & set(wanted))
    assert all(f"`{name}`" in left_out for name in wanted if name not in there)
    assert not any(summary["failed"] for summary in summaries)
    assert all(summary["runs"] and summary["data"] == DATA[page] for summary in summaries)


@pytest.mark.parametrize("page", PAGES)
def test_an_account_quotes_its_report(page):
    text, found = (RESULTS / f"{page}.md").read_text(), read(page)
    assert update(text, found) == text
    assert claims(found) in text


def test_no_verdict_of_a_training_run_rests_on_fewer_than_five_seeds(notes):
    seeds = [(note, int(match[1])) for _, note in notes if (match := re.search(r"\((\d+) seeds?\)", note["evidence"]))]
    assert len(seeds) > 10
    assert all(count >= LOOKS[0] for note, count in seeds if note["verdict"] != "open")


def test_at_most_one_claim_in_five_is_open(notes):
    assert {note["verdict"] for _, note in notes} <= set(VERDICTS)
    assert 5 * sum(note["verdict"] == "open" for _, note in notes) <= len(notes)


@pytest.mark.parametrize("page", quotes.PAGES)
def test_a_page_of_training_begins_with_a_picture_of_every_difference(page):
    text = (RESULTS / f"{page}.md").read_text()
    assert text.index(f"pictures/claims_{page}.svg") < text.index("<!-- claims -->")
    found = pictured.differences(read(page))
    counted = [note for summary in read(page) for note in summary["notes"] if " points (" in note["evidence"]]
    assert len(found) == len(counted) > 30
    (axes,) = pictured.picture(found).axes
    points = [(line.get_xdata(), line.get_ydata()) for line in axes.lines]
    drawn = {(float(x[0]), y[0]) for x, y in points if len(x) == 1}
    titles = len({each.study for each in found})
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == len(found) + titles
    for each, place in zip(found, axes.get_yticks(), strict=False):
        assert (each.mean, place) in drawn
        assert each.paper is None or (each.paper, place) in drawn


@pytest.mark.parametrize("page", PAGES)
def test_what_differs_has_its_reason_on_the_page(page):
    reasons = (RESULTS / f"{page}.md").read_text().partition("\n## What differs, and why\n")[2].partition("\n## ")[0]
    for summary in read(page):
        if any(note["verdict"] == "differs" for note in summary["notes"]):
            assert f"**{summary['title']}" in reasons


def note(claim, verdict, evidence, paper=""):
    return {"claim": claim, "verdict": verdict, "evidence": evidence, "paper": paper}


def test_an_account_leads_with_one_table_of_all_claims(summaries):
    differ = note("A beats B.", "differs", "noise 0.4, top-5 of a less b: -1.10 ± 0.20 points (8 seeds)", "+4.35")
    other = note("It is exact.", "open", "Largest error: 1e-7 in single, 1e-3 in half.")
    first = {**summaries[0], "data": "topk/ambiguous", "notes": [differ], "command": "topk-registry study noise"}
    second = {**summaries[0], "study": "stability", "data": "", "notes": [other]}
    lines = claims([first, second]).splitlines()
    assert lines[:6] == [
        "Of 2 claims 0 agree with the runs, 1 differ, 0 show no difference that matters, and 1 stay open.",
        "",
        "| claim | the paper | ours | verdict | study |",
        "| --- | --- | --- | --- | --- |",
        "| A beats B. *noise 0.4, top-5 of a less b* | +4.35 | -1.10 ± 0.20 points (8 seeds) | **differs** | "
        f"{first['study']}, `topk/ambiguous` |",
        "| It is exact. |  | Largest error: 1e-7 in single, 1e-3 in half. | open | stability |",
    ]
    assert lines[7].startswith(f"- {first['title']}: `topk-registry study noise`, {first['runs']} runs, ")


@pytest.mark.parametrize("page", PAGES)
def test_an_account_and_what_it_quotes_are_written_by_one_command(page, tmp_path):
    whole = tmp_path / "summary.json"
    whole.write_text(json.dumps([{"tables": [], **summary, "protocol": "as above"} for summary in read(page)]))
    text = tmp_path / f"{page}.md"
    text.write_text("<!-- claims -->\nold\n<!-- /claims -->\n")
    assert main([str(whole), str(text)]) == 0
    assert text.read_text() == f"<!-- claims -->\n{claims(read(page))}<!-- /claims -->\n"
    assert (tmp_path / f"{page}.json").read_text() == (RESULTS / f"{page}.json").read_text()


CHOOSE, README = RESULTS.parent / "guide" / "choose.md", RESULTS.parents[1] / "README.md"


def test_the_front_page_quotes_the_results(tmp_path):
    text = README.read_text()
    assert len(quotes.QUOTE.findall(text)) >= 2
    tuned = sorted({trial["loss_opt"]["tau"] for trial in TRIALS["smooth_topk_svm"]})
    assert f"at tau {' or '.join(f'{tau:g}' for tau in tuned)} as tuning chose" in text
    # a number of ours has a sign, and comes from the results alone
    assert not re.findall(r"[+-]\d+\.\d| ± ", quotes.QUOTE.sub("", text))
    pages = [tmp_path / "README.md", tmp_path / "choose.md"]
    for page, source in zip(pages, (README, CHOOSE), strict=True):
        page.write_text(re.sub(r"[+-]\d+\.\d", "+0.0", source.read_text()))
    assert quotes.main([str(RESULTS), *map(str, pages)]) == 0
    assert [page.read_text() for page in pages] == [text, CHOOSE.read_text()]


def test_the_page_that_advises_quotes_the_results():
    text, results = CHOOSE.read_text(), quotes.read(RESULTS)
    assert quotes.update(text, results) == text
    assert quotes.table(results) in text
    assert len(quotes.QUOTE.findall(text)) >= 10
    # no other difference in points is told as ours: the papers' are without a sign
    advice = quotes.QUOTE.sub("", text.partition("## What was measured")[0])
    assert not re.findall(r"[+-]\d+\.\d| ± ", advice)


def test_on_clean_labels_the_advice_is_what_was_measured():
    results = quotes.read(RESULTS)
    (of_features,) = (note for study in results["features"] for note in study["notes"] if "noise 0," in note["evidence"]
                      and study["study"] == "noise")  # fmt: skip
    mean = float(re.search(r"less smooth_topk_svm: ([+-][0-9.]+)", of_features["evidence"])[1])
    assert f"{-mean:+.1f}" in CHOOSE.read_text()
    assert mean < 0
    assert "it was\nbehind there too" in CHOOSE.read_text()


def test_the_decision_says_which_losses_no_study_compares(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS.parent / "_ext"))
    pictures = importlib.import_module("pictures")
    compared = json.dumps([read(page) for page in quotes.PAGES])
    told = {answer.replace("\n", ""): pictures.advised(answer) for _, answer in pictures.DECISION}
    for loss, words in told.items():
        assert ("no study of ours" in words) == (re.search(rf"\b{loss}\b", compared) is None), loss
    assert told["ce"] == "ce"
    assert "no study of ours" in told["generalised_cross_entropy"]


TUNE, FAQ = (RESULTS.parent / "guide" / name for name in ("tune.md", "faq.md"))


@pytest.mark.parametrize("page", [README, CHOOSE, TUNE, FAQ, *(RESULTS / f"{page}.md" for page in quotes.PAGES)])
def test_a_quotation_is_current_and_inside_a_line(page):
    text, results = page.read_text(), quotes.read(RESULTS)
    assert quotes.update(text, results) == text
    assert quotes.QUOTE.search(text)
    # a line of Markdown that begins with a comment ends the paragraph
    assert not re.findall(r"(?m)^\s*<!-- \w+ (?:features|images) -->", text)


@pytest.mark.parametrize("page", [TUNE, FAQ])
def test_guides_quote_the_results(page):
    text = page.read_text()
    # no difference of ours is written by hand
    assert not re.findall(r"[+-]\d+\.\d| ± ", quotes.BY_TAU.sub("", quotes.QUOTE.sub("", text)))


def test_what_is_said_of_tau_is_what_was_measured():
    """Every sentence below the table of docs/guide/tune.md that judges its numbers."""
    (study,) = (study for study in read("features") if study["study"] == "tau")
    fives, ones = (
        [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]] for table in study["tables"]
    )
    assert len(fives) == len(ones) == 6
    for row in fives:
        means = [row[f"tau = {tau}"]["mean"] for tau in ("0.1", "0.3", "1")]
        assert means == sorted(means, reverse=True)
        assert means[0] > row["ce"]["mean"]
        assert all(value["count"] >= LOOKS[0] for name, value in row.items() if name != "network, noise")
    assert not all(row["tau = 1"]["mean"] > row["ce"]["mean"] for row in fives)
    for row in ones:
        assert all(row[f"tau = {tau}"]["mean"] < row["ce"]["mean"] for tau in ("0.1", "0.3", "1"))
    (trials,) = json.loads((RESULTS / f"{quotes.TRIALS}.json").read_text())
    best = {row[1]: row[4] for row in trials["tables"][0]["rows"]}
    assert best["tau = 1"] > best["tau = 0.3"] > best["tau = 0.1"] > best["ce"]
    assert inspect.signature(get_loss_builder("smooth_topk_svm")).parameters["tau"].default == 1.0
    assert "So the default is 1," in TUNE.read_text()


def test_the_table_of_tau_has_a_cell_for_every_number():
    five, one = {"mean": 90.25, "half_width": 0.5, "count": 5}, {"mean": 40.0, "half_width": 1.0, "count": 5}
    tables = [{"columns": ["row", "tau = 1"], "rows": [["deep, 0.4", number]]} for number in (five, one)]
    other = [{"columns": ["row", "ce"], "rows": [["usual, 0", number]]} for number in (five, one)]
    made = {"features": [{"study": "tau", "tables": tables}], "images": [{"study": "tau", "tables": other}]}
    trial = {"columns": ["network, noise", "loss", "best top-5"], "rows": [["usual, 0.8", "tau = 1", 80.0]]}
    made[quotes.TRIALS] = [{"study": "tau", "tables": [trial]}]
    assert quotes.by_tau(made).splitlines() == [
        "| data | network, label noise | tau = 1 | cross-entropy |",
        "| --- | --- | --- | --- |",
        "| feature vectors | deep, 0.4 | 90.2 ± 0.5 (40.0) | - |",
        "| images | usual, 0 | - | 90.2 ± 0.5 (40.0) |",
        "| images, trials | usual, 0.8 | 80.0 | - |",
    ]


@pytest.mark.parametrize(
    ("verdict", "told"),
    [("agrees", "+2.0 ± 0.5"), ("open", "open: +2.0 ± 0.5"), ("same", "no difference above 1")],
)
def test_a_cell_says_what_the_verdict_is(verdict, told):
    note = {"verdict": verdict, "evidence": "top-5 of b less a: -2.00 ± 0.50 points (8 seeds)"}
    row = quotes.Row("a less b", "noise", ("top-5 of b less a",), sign=-1)
    assert quotes.cell(row, [{"study": "noise", "notes": [note]}]) == told
