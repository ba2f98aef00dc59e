"""The committed accounts: whole, quoted as they are, and as decided as they say."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import topk_registry as tr
from topk_registry import get_loss_builder
from topk_studies.engine.catalogue import OWN, PAPERS, load_study
from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.settings import TRIALS
from topk_studies.engine.statistics import LOOKS
from topk_studies.engine.store import Store, unique
from topk_studies.engine.study import Options, Record
from topk_studies.engine.tuning import TUNING_SEED
from topk_studies.report import claims as pictured
from topk_studies.report import quotes, regime, tau
from topk_studies.report.account import VERDICTS, claims, main, update

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
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


def test_one_study_is_renewed_without_the_others(tmp_path):
    before = read("images")
    one = {**before[2], "runs": 1, "tables": []}
    summary, text = tmp_path / "summary.json", tmp_path / "images.md"
    summary.write_text(json.dumps([{**one, "study": "of tomorrow"}, one]))
    text.with_suffix(".json").write_text(json.dumps(before))
    text.write_text("<!-- claims -->\nold\n<!-- /claims -->\n")
    assert main([str(summary), str(text)]) == 0
    after = json.loads(text.with_suffix(".json").read_text())
    assert [each["study"] for each in after] == [*(each["study"] for each in before), "of tomorrow"]
    assert [each["runs"] for each in after] == [
        *(each["runs"] for each in before[:2]),
        1,
        *(each["runs"] for each in before[3:]),
        1,
    ]
    assert claims(after) in text.read_text()


CHOOSE, README = RESULTS.parent / "guide" / "choose.md", RESULTS.parents[1] / "README.md"


def test_the_front_page_quotes_the_results(tmp_path):
    text = README.read_text()
    assert len(quotes.QUOTE.findall(text)) >= 2
    tuned = sorted({trial["loss_opt"]["tau"] for trial in TRIALS["smooth_topk_svm"]})
    assert f"at tau {' or '.join(f'{value:g}' for value in tuned)} as tuning chose" in text
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
    compared = json.dumps([read(page) for page in (*quotes.PAGES, *quotes.OF_ONE)])
    told = {answer.replace("\n", ""): pictures.advised(answer) for _, answer in pictures.DECISION}
    for loss, words in told.items():
        assert ("no study of ours" in words) == (re.search(rf"\b{loss}\b", compared) is None), loss
    assert told["ce"] == "ce"
    assert "no study of ours" not in told["logit_adjustment"]  # a page of its own


TUNE, FAQ = (RESULTS.parent / "guide" / name for name in ("tune.md", "faq.md"))
CHOICE, TAILS = RESULTS / "tau.md", RESULTS.parent / "tutorials" / "long_tails.md"


@pytest.mark.parametrize("page", [CHOICE, TUNE])
def test_tables_of_tau_are_current(page):
    text = page.read_text()
    assert tau.summary(tau.conditions(quotes.read(RESULTS))) in text
    assert quotes.update(text, quotes.read(RESULTS)) == text


@pytest.mark.parametrize("page", [TAILS, README, CHOOSE, TUNE, FAQ, *(RESULTS / f"{page}.md" for page in quotes.PAGES)])
def test_a_quotation_is_current_and_inside_a_line(page):
    text, results = page.read_text(), quotes.read(RESULTS)
    assert quotes.update(text, results) == text
    assert quotes.QUOTE.search(text)
    # a line of Markdown that begins with a comment ends the paragraph
    assert not re.findall(r"(?m)^\s*<!-- \w+ (?:features|images|small_sets|rare_classes) -->", text)


@pytest.mark.parametrize("page", [TUNE, FAQ])
def test_guides_quote_the_results(page):
    text = page.read_text()
    # no difference of ours is written by hand
    assert not re.findall(r"[+-]\d+\.\d| ± ", quotes.QUOTE.sub("", text))


def test_the_default_of_tau_is_what_the_rule_chooses():
    found = tau.conditions(quotes.read(RESULTS))
    assert {row.data for row in found} == set(tau.WORDS.values())
    value = float(tau.chosen(found).partition(" = ")[2])
    functions = (
        get_loss_builder("smooth_topk_svm"),
        tr.functional.smooth_topk_loss,
        tr.functional.linear_smooth_topk,
        tr.LinearSmoothTopK,
    )
    assert {inspect.signature(each).parameters["tau"].default for each in functions} == {value}
    whole = [row for row in found if min(number["count"] for number in row.top5.values()) >= LOOKS[0]]
    assert {row.data for row in whole} == set(tau.WORDS.values())
    assert tau.chosen(whole) == tau.chosen(found)
    for page, words in (
        (CHOICE, "Its default\nis {}."),
        (TUNE, "**The default is {}**"),
        (README, "it is {} unless given"),
        (RESULTS / "features.md", "Take tau {}, the default."),
        (README, "how hard a label pulls at tau = {} and 1"),
        (ROOT / "docs" / "pictures" / "front.svg", "smooth_topk_svm: tau = {}, dashed 1"),
    ):
        assert words.format(f"{value:g}") in page.read_text(), page


def test_what_is_said_of_tau_is_what_was_measured():
    """Every sentence of docs/results/tau.md and docs/guide/tune.md that judges the numbers of the tables."""
    found = tau.conditions(quotes.read(RESULTS))
    low, middle, high = "tau = 0.1", "tau = 0.3", "tau = 1"
    of_features = [row for row in found if row.data == tau.WORDS["features"]]
    of_images = [row for row in found if row.data == tau.WORDS["tau_images"]]
    assert len(of_features) == len(of_images) == 6
    for row in of_features:
        assert row.means[low] > row.means[middle] > row.means[high]
        assert row.means[low] > row.top5["ce"]["mean"]
        assert all(number["count"] >= LOOKS[0] for number in row.top5.values())
        assert all(row.top1[value]["mean"] < row.top1["ce"]["mean"] for value in row.means)
    assert all((row.means[high] > row.means[low]) == (row.network == "usual") for row in of_images)
    assert {row.network for row in of_images} == {"usual", "deep"}
    short = tau.shortfalls(found)
    assert max(short[low]) < max(short[middle]) < max(short[high])
    gap = [row.means[high] - row.means[low] for row in of_images]
    assert max(gap) < min(row.means[low] - row.means[high] for row in of_features)
    assert tau.behind(found) == {high}
    for row in of_images:
        ahead = [row.top1[value]["mean"] > row.top1["ce"]["mean"] for value in row.means]
        assert all(ahead) or (row.network, row.noise) == ("deep", "0")
        if row.network == "deep":
            assert abs(row.means[low] - row.means[middle]) < 0.3
            assert row.means[high] < min(row.means[low], row.means[middle])
    (images,) = quotes.read(RESULTS)["tau_images"]
    assert {note["verdict"] for note in images["notes"]} == {"open"}
    evidence = {note["evidence"] for note in images["notes"]}
    of = "network, mean over noise, top-5 of tau = 0.1 less tau = 1:"
    assert {f"usual {of} -1.20 ± 2.55 points (5 seeds)", f"deep {of} +0.80 ± 3.54 points (5 seeds)"} < evidence
    words = "0.1 less 1 is -1.2 ± 2.6 points behind the usual network and +0.8 ± 3.5 behind the deep one"
    assert words in CHOICE.read_text()


NUMBER = r"(?:[+-]?\d+(?:\.\d+)?|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)"
CHECKED = "Numbers of this section that stand in no table are of single runs, made to find a reason. They were not kept"


def conclusions(page):
    """The conclusions of a page of results, with the quotations of results taken out."""
    text = quotes.QUOTE.sub("", (RESULTS / f"{page}.md").read_text())
    return text.partition("## What to take from it\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", quotes.PAGES)
def test_a_number_in_a_conclusion_comes_from_the_results(page):
    """Those that are no quotation are held below."""
    (study,) = (study for study in read("features") if study["study"] == "tau")
    (beyond,) = (table for table in study["tables"] if table["title"] == "Beyond accuracy")
    rows = [dict(zip(beyond["columns"], row, strict=True)) for row in beyond["rows"]]
    found = {(row["network, noise"], row[""]): row for row in rows}
    errors = {
        name: [
            row["calibration error"]["mean"] for key, row in found.items() if key[0][:5] == "usual" and key[1] == name
        ]
        for name in ("ce", "tau = 0.1")
    }
    sizes = {key: row["set size"]["mean"] for key, row in found.items()}
    clean = next(row for row in tau.conditions(quotes.read(RESULTS)) if (row.network, row.noise) == ("usual", "0"))
    ends = {(case["loss"], case["lr"]): case["test_top5"][-1] for case in quotes.read(RESULTS)[quotes.REGIME]}
    assert {size for (where, name), size in sizes.items() if (name, where[:4]) == ("tau = 1", "deep")} == {100.0}
    wanted = [
        f"top-1 is {clean.top1['ce']['mean'] - clean.top1['tau = 0.1']['mean']:.1f} points behind on clean labels",
        f"ends at {ends['ce', 0.002]:.1f} % of top-5; at its own rate it ends at {ends['ce', 0.0005]:.1f}",
        f"is {min(errors['tau = 0.1']):.2f} to {max(errors['tau = 0.1']):.2f} against "
        f"{min(errors['ce']):.2f} to {max(errors['ce']):.2f} of cross-entropy",
        f"{sizes['usual, 0', 'tau = 0.1']:.1f} classes against {sizes['usual, 0', 'ce']:.1f} on clean labels, "
        f"{sizes['usual, 0.8', 'tau = 0.1']:.1f} against {sizes['usual, 0.8', 'ce']:.1f} under noise 0.8",
    ]
    told = " ".join(conclusions(page).split())
    if page == "features":
        for sentence in wanted:
            assert sentence in told, sentence
            told = told.replace(sentence, "")
    assert not re.findall(rf"\b{NUMBER} (?:points|%)", told)
    assert not re.search(r" ± |[+-]\d+\.\d", told)


@pytest.mark.parametrize("page", quotes.PAGES)
def test_reasons_say_that_they_rest_on_single_runs(page):
    text = (RESULTS / f"{page}.md").read_text()
    assert CHECKED in text.partition("## What differs, and why\n")[2].partition("\n## ")[0]


def test_the_papers_regime_is_of_the_runs(tmp_path):
    cases = quotes.read(RESULTS)[quotes.REGIME]
    assert regime.table(cases) in (RESULTS / "features.md").read_text()
    folder = tmp_path / "runs" / "train"
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="has no run of"):
        regime.collect(tmp_path)
    for i, case in enumerate(cases):
        flags = {"loss": case["loss"], "lr": case["lr"], "label_noise": 0.8, "seed": TUNING_SEED, "loss_opt": {}}
        values = [
            dict(zip(regime.MEASURES, each, strict=True)) for each in zip(*map(case.get, regime.MEASURES), strict=True)
        ]
        rows = [{"epoch": float(epoch), **row} for epoch, row in zip(regime.EPOCHS, values, strict=True)]
        record = {"configuration": {"flags": flags}, "result": {"history": rows}, "error": "", "when": case["when"]}
        (folder / f"{i}.json").write_text(json.dumps(record))
    assert regime.main([str(tmp_path), str(tmp_path / "regime.json")]) == 0
    assert (tmp_path / "regime.json").read_text() == (RESULTS / "regime.json").read_text()
    assert regime.main([]) == 2


def of_tau(mean, half=0.5, count=5):
    return {"mean": mean, "half_width": half, "count": count}


def study_of_tau(*rows):
    """A study of these rows: a name, and the top-5 of cross-entropy and of two values."""
    five = [[name, *numbers] for name, *numbers in rows]
    one = [[name, *(number and of_tau(number["mean"] / 2) for number in numbers)] for name, *numbers in rows]
    columns = ["network, noise", "ce", "tau = 0.1", "tau = 1"]
    return [{"study": "tau", "notes": [], "tables": [{"columns": columns, "rows": each} for each in (five, one)]}]


def test_a_value_is_chosen_by_its_largest_shortfall_and_never_behind_cross_entropy():
    features = study_of_tau(
        ["usual, 0", of_tau(92), of_tau(90), of_tau(93)], ["deep, 0.4", of_tau(80), None, of_tau(9)]
    )
    images = study_of_tau(["usual, 0.4", None, of_tau(90, None, 1), of_tau(80, 1.0, 3)])
    found = tau.conditions({"features": features, "tau_images": images})
    assert [row.network for row in found] == ["usual", "usual"]  # the other row has not every value
    assert tau.shortfalls(found) == {"tau = 0.1": [3, 0], "tau = 1": [0, 10]}
    assert tau.behind(found) == {"tau = 0.1"}
    assert tau.chosen(found) == "tau = 1"
    assert tau.table(found).splitlines() == [
        "| data | network | label noise | seeds | cross-entropy | tau = 0.1 | tau = 1 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| feature vectors | usual | 0 | 5 | 92.0 ± 0.5 (46.0) | 90.0 ± 0.5 (45.0) | 93.0 ± 0.5 (46.5) |",
        "| images | usual | 0.4 | 1 to 3 | - | 90.0 (45.0) | 80.0 ± 1.0 (40.0) |",
    ]
    assert tau.summary(found).splitlines()[2:] == [
        "| largest shortfall, points | 3.0 | 10.0 |",
        "| mean shortfall, points | 1.5 | 5.0 |",
        "| best of its row, of 2 | 1 | 1 |",
        "| on clean labels behind cross-entropy | yes | no |",
    ]


def test_runs_of_several_commands_are_collected(tmp_path):
    study, store = load_study("tau"), Store(tmp_path)
    wanted = unique(study.configurations(Options(seeds=(0,), flags={"label_noise": 0.4, "model": "topk_convnet"}), []))
    for configuration in wanted:
        row = {name: 50.0 for metric in ("top5", "top1") for name in (metric, f"test_{metric}")}
        result = {"history": [{"epoch": 1.0, **row}]}
        store.put(Record(study.RUNS, study.VERSION, configuration, result, 1.0, "", {}))
    assert tau.main([str(tmp_path), str(tmp_path / "found.json")]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text())
    (row,) = tau.conditions({"features": [], "tau_images": [found]})
    assert (found["runs"], row.network, row.noise, row.seeds) == (len(wanted), "usual", "0.4", "1")
    assert list(row.top5) == ["ce", "tau = 0.1", "tau = 0.3", "tau = 1"]
    assert tau.main([]) == 2


def test_a_difference_of_sizes_is_told_as_one():
    evidence = "set size of a less b: {} ± 0.10 classes (8 seeds)"
    row = quotes.Row("a less b", "small-sets", ("set size of a less b",))
    notes = [
        {"verdict": "agrees", "evidence": evidence.format("+2.00")},
        {"verdict": "same", "evidence": f"{evidence.format('+0.05')}; no difference larger than 0.2"},
    ]
    told = [quotes.cell(row, [{"study": "small-sets", "notes": [note]}]) for note in notes]
    assert told == ["+2.0 ± 0.1", "no difference above 0.2"]


@pytest.mark.parametrize(
    ("verdict", "told"),
    [("agrees", "+2.0 ± 0.5"), ("open", "open: +2.0 ± 0.5"), ("same", "no difference above 1")],
)
def test_a_cell_says_what_the_verdict_is(verdict, told):
    note = {"verdict": verdict, "evidence": "top-5 of b less a: -2.00 ± 0.50 points (8 seeds)"}
    row = quotes.Row("a less b", "noise", ("top-5 of b less a",), sign=-1)
    assert quotes.cell(row, [{"study": "noise", "notes": [note]}]) == told
