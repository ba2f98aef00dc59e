"""The study of several labels: its runs, its report, and the page that quotes it."""

# values of tables are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportOperatorIssue=false

import json
import re
from pathlib import Path

import pytest

from topk_registry.train.config.arguments import parse_args
from topk_studies.engine import training
from topk_studies.engine.study import Options
from topk_studies.experiments.several_labels import CLAIMS, PLAIN, RATES, STUDY, WAYS
from topk_studies.report import account, ways

from .records import finished

PAGE = Path(__file__).parents[2] / "docs" / "results" / "several_labels.md"


@pytest.fixture(scope="module")
def records():
    return finished(STUDY, Options(seeds=(0, 1, 2, 3, 4)))


def test_every_way_is_tuned_as_much_and_told_by_its_name(records):
    found = STUDY.choices(records)
    assert [STUDY.name(choice) for choice in found] == list(WAYS)
    assert {len(choice.trials) for choice in found} == {len(RATES)}
    assert {tuple(sorted(choice.runs)) for choice in found} == {(0, 1, 2, 3, 4)}


def test_every_run_is_a_command_line_that_parses(records):
    for record in records:
        args, flags = parse_args(training.arguments(record.configuration)), record.configuration["flags"]
        for name in ("task", "loss", "lr", "loss_pos_weight", "loss_weight_power", "eval_metric"):
            assert getattr(args, name) == flags.get(name, getattr(parse_args(["x"]), name)), name


def test_a_report_has_a_table_and_both_metrics_of_each_claim(records):
    report = STUDY.report(records)
    table = next(table for table in report.tables if table.title == "Several labels an image")
    assert [row[0] for row in table.rows] == list(WAYS)
    assert len(report.notes) == 2 * len(CLAIMS)
    against = next(table for table in report.tables if table.title == f"Difference from {PLAIN}")
    assert len(against.rows) == len(WAYS) - 1


@pytest.mark.slow
def test_a_run_measures_several_labels_on_both_splits(tmp_path):
    configuration = STUDY.wanted(Options(losses=("ksubset_nll",)), [], (0,))[0]
    flags = {**configuration["flags"], "epochs": 1, "dataset_opt": {"size": 64, "eval_size": 64}}
    found = training.run({**configuration, "flags": flags}, tmp_path, lambda share, words: None)
    (row,) = found["history"]
    assert {"map", "test_map", "test_macro_f1", "test_top5_recall", "nonzero"} <= set(row)
    assert found["data"] == {"classes": 20, "images": {"validation": 64, "test": 64}}


def test_the_page_quotes_its_results():
    text, (summary,) = PAGE.read_text(encoding="utf-8"), json.loads(PAGE.with_suffix(".json").read_text("utf-8"))
    assert (summary["study"], summary["failed"]) == (STUDY.NAME, 0)
    assert ways.update(text, summary) == text
    assert account.update(text, [summary]) == text
    assert [row[0] for row in summary["tables"][0]["rows"]] == list(WAYS)
    highest = [row for row in summary["tables"][1]["rows"] if re.search(rf"lr={max(RATES)}\b", row[2])]
    assert f"For {len(highest)} of the {len(WAYS)} ways the highest rate, {max(RATES)}, was best" in text
    assert len(summary["notes"]) == 2 * len(CLAIMS)
