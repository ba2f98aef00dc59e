"""The study of small prediction sets: its runs, what it chooses by, its report, and the page that quotes it."""

# values of tables are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportOperatorIssue=false

import json
from pathlib import Path

import pytest

from topk_registry.train.config.arguments import parse_args
from topk_studies.engine import training
from topk_studies.engine.store import canonical
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import best_epoch, score
from topk_studies.experiments.small_sets import (
    AVERAGED,
    BASELINE,
    CLAIMS,
    CONFORMAL,
    EFFECT,
    FOCAL,
    OWN,
    SIZE,
    SMOOTH,
    STUDY,
)
from topk_studies.report import account, claims, quotes, ways

from .records import finished

PAGE = Path(__file__).parents[2] / "docs" / "results" / "small_sets.md"
OPTIONS = Options(flags={"dataset": "topk/ambiguous"}, max_seeds=5)


@pytest.fixture(scope="module")
def records():
    return finished(STUDY, OPTIONS)


def test_every_loss_is_tuned_as_much_and_measures_sets_on_both_splits(records):
    assert all(record.configuration["sets"] for record in records)
    found = STUDY.choices(records)
    assert [choice.loss for choice in found] == list(STUDY.LOSSES)
    assert {len(choice.trials) for choice in found} == {4}
    assert {tuple(sorted(choice.runs)) for choice in found} == {(0, 1, 2, 3, 4)}
    for record in records:
        flags = record.configuration["flags"]
        args = parse_args(training.arguments(record.configuration))
        assert (args.loss, args.lr) == (flags["loss"], flags["lr"])


def test_the_smallest_sets_of_the_validation_split_choose_trial_and_epoch(records):
    for choice in STUDY.choices(records):
        sizes = [min(row[SIZE] for row in record.result["history"]) for record in choice.trials]
        (best,) = (record for record in choice.trials if score(record, SIZE, "validation") == min(sizes))
        assert {name: best.configuration["flags"][name] for name in choice.trial} == choice.trial
        for record in choice.runs.values():
            row = best_epoch(record, SIZE)
            assert row[SIZE] == min(each[SIZE] for each in record.result["history"])
            assert score(record, SIZE) == row[f"test_{SIZE}"]
    (table,) = (table for table in STUDY.report(records).tables if table.title == "What tuning chose")
    assert all(row[4] < row[5] for row in table.rows)
    assert "classes" in table.note


def test_a_claim_holds_where_sets_are_smaller(records):
    smaller = [
        type(record)(**{**vars(record), "result": {"history": [{**row, f"test_{SIZE}": size} for row in rows]}})
        for record in records
        for rows in [record.result["history"]]
        for seed in [record.configuration["flags"]["seed"]]
        for size in [{BASELINE: 4.0, CONFORMAL: 4.05, AVERAGED: 3.0}.get(record.configuration["flags"]["loss"], 5.0)]
        for size in [size + 0.001 * (seed % 7)]
    ]
    notes = STUDY.report(smaller).notes
    assert len(notes) == len(CLAIMS)
    told = {note.evidence.partition(":")[0]: note for note in notes}
    assert told[f"set size of {BASELINE} less {AVERAGED}"].verdict == "agrees"
    assert "+1.00 ± 0.00 classes (5 seeds)" in told[f"set size of {BASELINE} less {AVERAGED}"].evidence
    assert told[f"set size of {BASELINE} less {CONFORMAL}"].verdict == "differs"
    assert EFFECT > 0.05


@pytest.mark.slow
def test_a_run_measures_sets_of_both_splits_and_chooses_nothing_else(tmp_path):
    wanted = STUDY.wanted(OPTIONS, [], (0,))[0]
    size = {"size": 256, "eval_size": 512}
    flags = {**wanted["flags"], "epochs": 1, "dataset_opt": {**wanted["flags"]["dataset_opt"], **size}}
    found = [
        training.run({**wanted, "flags": flags, "sets": sets}, tmp_path / str(sets), lambda share, words: None)
        for sets in (True, False)
    ]
    (row,), (without,) = (each["history"] for each in found)
    assert {name for name in row if name not in without} >= {SIZE, "set_coverage"}
    assert {name: row[name] for name in without} == without
    assert 1.0 <= row[SIZE] <= 100.0
    assert 1.0 <= row[f"test_{SIZE}"] <= 100.0


def test_runs_with_and_without_sets_of_the_validation_split_are_two_runs():
    one = STUDY.wanted(OPTIONS, [], (0,))[0]
    plain = {name: value for name, value in one.items() if name != "sets"}
    assert canonical(one) != canonical(plain)


def test_the_page_quotes_its_results():
    text, (summary,) = PAGE.read_text(encoding="utf-8"), json.loads(PAGE.with_suffix(".json").read_text("utf-8"))
    assert (summary["study"], summary["data"], summary["failed"]) == (STUDY.NAME, "topk/ambiguous", 0)
    assert ways.update(text, summary) == text
    assert account.update(text, [summary]) == text
    assert quotes.update(text, quotes.read(PAGE.parent)) == text
    sizes, tuned = summary["tables"]
    compared = {name for name, *_ in sizes["rows"]}
    assert compared == set(STUDY.LOSSES)
    notes = summary["notes"]
    assert len(notes) == len(claims.differences([summary])) == sum({one, other} <= compared for one, other, _ in CLAIMS)
    axes = claims.picture(claims.differences([summary])).axes[0]
    assert axes.get_xlabel() == "classes in a set; above 0 the claim holds"
    # sentences that no quotation holds
    largest, best = (max(sizes["rows"], key=lambda row: row[column]["mean"])[0] for column in (1, 3))
    assert (largest, best) == (SMOOTH, SMOOTH)
    verdicts = {note["evidence"].partition(":")[0]: note["verdict"] for note in notes}
    assert verdicts == {
        f"set size of {BASELINE} less {CONFORMAL}": "same",
        f"set size of {BASELINE} less {AVERAGED}": "same",
        f"set size of {CONFORMAL} less {AVERAGED}": "same",
        f"set size of {FOCAL} less {CONFORMAL}": "same",
        f"set size of {SMOOTH} less {CONFORMAL}": "agrees",
    }
    assert sorted({trial["loss_opt"]["cross_entropy_weight"] for trial in OWN}) == [1.0, 10.0]
    assert next(row[2] for row in tuned["rows"] if row[1] == CONFORMAL).endswith("cross_entropy_weight=10")
    assert EFFECT == 1 / 5
