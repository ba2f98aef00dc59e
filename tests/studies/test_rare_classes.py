"""The study of rare classes: its runs and its report."""

# values of tables are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportOperatorIssue=false

import json
from pathlib import Path

import pytest

from topk_registry.train.config.arguments import parse_args
from topk_studies.engine import training
from topk_studies.engine.settings import RATES
from topk_studies.engine.study import Options
from topk_studies.experiments.rare_classes import COMPARED, PLAIN, STUDY, WAYS
from topk_studies.report import account, ways

from .records import finished

PAGE = Path(__file__).parents[2] / "docs" / "results" / "rare_classes.md"


@pytest.fixture(scope="module")
def records():
    return finished(STUDY, Options(flags={"dataset": "topk/ambiguous"}, max_seeds=5))


def test_every_way_is_tuned_as_much_and_told_by_its_name(records):
    found = STUDY.choices(records)
    assert [STUDY.name(choice) for choice in found] == list(WAYS)
    assert {len(choice.trials) for choice in found} == {len(RATES)}
    assert {tuple(sorted(choice.runs)) for choice in found} == {(0, 1, 2, 3, 4)}
    for name, trials in ((STUDY.name(choice), choice.trials) for choice in found):
        tried = {json.dumps(WAYS[name].trials[i]) for i in range(len(trials))}
        assert len(tried) == len(trials)


def test_every_run_is_a_command_line_that_parses(records):
    for record in records:
        args, flags = parse_args(training.arguments(record.configuration)), record.configuration["flags"]
        for name in ("loss", "lr", "class_weight", "loss_weight_power", "sampler", "sampler_beta"):
            assert getattr(args, name) == flags.get(name, getattr(parse_args(["x"]), name)), name
        assert (args.long_tail, args.imbalance_factor) == ("exp", 100.0)


def test_a_report_has_a_table_and_both_metrics_of_each_comparison(records):
    report = STUDY.report(records)
    table = next(table for table in report.tables if table.title == "Accuracy on a long tail")
    assert [row[0] for row in table.rows] == list(WAYS)
    assert len(report.notes) == 2 * len(COMPARED)
    against = next(table for table in report.tables if table.title == f"Difference from {PLAIN}")
    assert len(against.rows) == len(WAYS) - 1


def test_the_page_quotes_its_results():
    text, (summary,) = PAGE.read_text(encoding="utf-8"), json.loads(PAGE.with_suffix(".json").read_text("utf-8"))
    assert (summary["study"], summary["data"], summary["failed"]) == (STUDY.NAME, "topk/ambiguous", 0)
    assert ways.update(text, summary) == text
    assert account.update(text, [summary]) == text
    assert [row[0] for row in summary["tables"][0]["rows"]] == list(WAYS)
    assert len(summary["notes"]) == 2 * len(COMPARED)
