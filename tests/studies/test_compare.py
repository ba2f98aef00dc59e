"""The comparison of losses on one's own data: equal budgets, and advice that says how sure it is."""

# values of tables and attributes of studies are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import json
import random
from dataclasses import replace

import pytest

from topk_registry import refresh_plugins
from topk_registry.cli.main import main
from topk_studies.engine.catalogue import load_study
from topk_studies.engine.settings import rates
from topk_studies.engine.store import canonical, unique
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import TUNING_SEED
from topk_studies.experiments import compare
from topk_studies.experiments.compare import RUNGS, TRIALS, trials

from .conftest import trained
from .test_command import TINY

LOSSES = ("ce", "smooth_topk_svm", "focal", "topk_hinge")
BEST_RATE = rates("adamw", TRIALS)[3]


def finished(options, quality, spread=0.3):
    """All records that the comparison comes to want.

    A run's score is its loss's, less its distance from a rate, which outweighs chance.
    """
    study, known = load_study("compare"), {}
    while True:
        wanted = unique(study.configurations(options, list(known.values())))
        new = [configuration for configuration in wanted if canonical(configuration) not in known]
        if not new:
            return study, list(known.values())
        for one in new:
            flags = one["flags"]
            draw = random.Random(canonical(one))
            value = quality[flags["loss"]] - 4000 * abs(flags["lr"] - BEST_RATE) + draw.uniform(-spread, spread)
            row = {"top5": value, "test_top5": value - 5.0}
            known[canonical(one)] = trained(one, [row])


@pytest.fixture(scope="module")
def ranked():
    quality = {"ce": 80.0, "smooth_topk_svm": 86.0, "focal": 79.9, "topk_hinge": 5.0}
    return finished(Options(losses=LOSSES), quality)


def test_every_loss_gets_the_same_budget(ranked):
    study, records = ranked
    epochs, runs = {}, {}
    for record in records:
        flags = record.configuration["flags"]
        if flags["seed"] == TUNING_SEED:
            epochs[flags["loss"]] = epochs.get(flags["loss"], 0) + flags["epochs"]
        else:
            runs.setdefault(flags["loss"], set()).add((flags["seed"], flags["epochs"]))
    assert set(epochs.values()) == {sum(count * 8 // part for count, part in RUNGS)}
    assert list(runs.values()) == [{(seed, 8) for seed in study.SEEDS}] * len(LOSSES)


def test_halving_ends_at_the_best_trial(ranked):
    study, records = ranked
    for choice in study.choices(records):
        reached = {record.configuration["flags"]["lr"] for record in choice.trials}
        assert choice.trial["lr"] == min(reached, key=lambda lr: abs(lr - BEST_RATE))


def test_the_ranking_says_what_to_take_and_how_sure_that_is(ranked):
    study, records = ranked
    found = study.report(records)
    table = found.tables[0]
    assert table.rows[0][0] == "smooth_topk_svm"
    assert [row[table.columns.index("than the best")] for row in table.rows] == ["", "worse", "worse", "worse"]
    advice = found.notes[0]
    assert advice.claim.startswith("Take smooth_topk_svm with lr=")
    assert advice.verdict == "agrees"
    assert "surely better than" in advice.evidence


def test_what_cannot_be_told_apart_is_not_ranked():
    study, records = finished(Options(losses=("ce", "focal")), {"ce": 80.0, "focal": 80.2}, spread=4.0)
    advice = study.report(records).notes[0]
    assert advice.verdict == "open"
    assert "Not told apart from" in advice.evidence


def test_a_few_seeds_that_differ_by_the_same_are_no_proof():
    study, records = finished(Options(losses=("ce", "focal"), seeds=(0, 1)), {"ce": 80.0, "focal": 70.0}, spread=0.0)
    advice, note = study.report(records).notes
    assert advice.verdict == note.verdict == "open"


def test_a_loss_that_does_not_take_the_data_is_tried_once():
    losses = "ce", "bce"
    options = Options(losses=losses)
    study = compare.STUDY
    first = study.configurations(options, [])
    assert [one["flags"]["loss"] for one in first] == ["ce", "bce"]
    known = [
        replace(trained(one, [{"top5": 80.0, "test_top5": 75.0}]), error="refused" * (one["flags"]["loss"] == "bce"))
        for one in first
    ]
    then = study.configurations(options, known)
    counts = {loss: sum(one["flags"]["loss"] == loss for one in then) for loss in losses}
    assert counts == {"ce": TRIALS, "bce": 1}


def test_more_seeds_go_to_the_losses_that_are_not_decided():
    quality = {"ce": 80.0, "focal": 80.0, "topk_hinge": 5.0}
    _, records = finished(Options(losses=tuple(quality), max_seeds=21), quality, spread=2.0)
    runs = {choice.loss: len(choice.runs) for choice in compare.STUDY.choices(records)}
    assert runs["topk_hinge"] == 5
    assert runs["ce"] == runs["focal"] > 5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("flags", [{}, {"opt": "sgd"}])
def test_a_losss_trials_differ_and_are_as_many_for_all(loss, flags):
    found = trials(Options(flags=flags), loss)
    assert len({json.dumps(trial, sort_keys=True) for trial in found}) == len(found) == TRIALS


def test_a_report_of_few_records_or_none_is_a_report_still(ranked):
    study, records = ranked
    for some in ([], records[:1], records[:9], records[::3], records[-1:]):
        study.report(some)


@pytest.mark.slow
def test_a_third_partys_loss_is_compared_over_its_own_grid(site, tmp_path, monkeypatch, capsys):
    source = "import torch.nn.functional as F\ndef build(*, sharpness=1.0):\n"
    source += "    return lambda logits, target: F.cross_entropy(sharpness * logits, target)\n"
    site.module("sharp_loss", source + "build.tuning_grid = {'sharpness': (0.5, 1.0, 2.0)}\n")
    site.distribution("sharp-loss", {"sharp_one": "sharp_loss:build"})
    refresh_plugins()
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    monkeypatch.setattr(compare, "TRIALS", 3)
    monkeypatch.setattr(compare, "RUNGS", ((3, 1),))
    argv = ["study", "compare", "--losses", "sharp_*", *TINY[:-2], "--max-seeds", "2", "--output", str(tmp_path)]
    assert main(argv) == 0
    assert "Take " in capsys.readouterr().out
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert {row[0] for row in summary["tables"][0]["rows"]} == {"sharp_one"}
    assert summary["failed"] == 0
    records = json.loads((tmp_path / "runs.json").read_text())
    tried = {record["configuration"]["flags"].get("loss_opt", {}).get("sharpness") for record in records}
    assert tried == {0.5, 1.0, 2.0}
