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
from topk_studies.engine.plan import Kind, all_runs, words
from topk_studies.engine.settings import rates
from topk_studies.engine.store import canonical, unique
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import TUNING_SEED, run_of
from topk_studies.experiments import compare
from topk_studies.experiments.compare import RUNGS, TRIALS, trials

from .conftest import TINY_FLAGS, trained

LOSSES = ("ce", "smooth_topk_svm", "focal", "topk_hinge")
BEST_RATE = rates("adamw", TRIALS)[3]


def finished(options, quality, spread=0.3, *, best_rate=BEST_RATE, data=None, images=None):
    """All records that the comparison comes to want.

    A run's score is its loss's, less its distance from a rate, which outweighs chance; it is at most 100, and of a
    number of validation images. ``data`` is what the runs note of their data.
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
            value = quality[flags["loss"]] - 4000 * abs(flags["lr"] - best_rate) + draw.uniform(-spread, spread)
            seen = min(100.0, value if images is None else round(value * images / 100) * 100 / images)
            metric = flags["eval_metric"]
            known[canonical(one)] = trained(one, [{metric: seen, f"test_{metric}": value - 5.0}], data=data or {})


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


QUALITY = {"ce": 80.0, "smooth_topk_svm": 86.0}
LARGE = {"classes": 100, "images": {"validation": 500, "test": 1000}, "guess": {"top5": 6.0}}
SMALL = {"classes": 6, "images": {"validation": 12, "test": 120}, "guess": {"top5": 83.3, "top2": 33.3}}


def reported(quality, **how):
    study, records = finished(Options(losses=tuple(quality), **how.pop("options", {})), quality, **how)
    return study.report(records)


def test_a_verdict_on_enough_data_is_one():
    advice, note = reported(QUALITY, data=LARGE).notes
    assert (advice.verdict, note.verdict) == ("agrees", "agrees")


@pytest.mark.parametrize(
    ("how", "reason", "remedy"),
    [
        ({"data": SMALL}, "top-5 of 6 classes: a guess is right in 83.3 %", '--flags loss_opt="k=2"'),
        ({"data": {**LARGE, "guess": {"top5": 79.5}}}, "no more than a guess (79.5 %) may", "--flags epochs=N"),
        ({"data": LARGE, "best_rate": 1e-4}, "lr=0.00025 is the lowest that was tried", "--rates 3.13e-05 0.004"),
        ({"data": LARGE, "best_rate": 5e-3}, "lr=0.004 is the highest that was tried", "--rates 0.00025 0.032"),
    ],
)
def test_a_verdict_that_the_runs_cannot_give_is_none_and_says_what_would(how, reason, remedy):
    found = reported(QUALITY, **how)
    advice, *notes = found.notes
    assert advice.claim == "No verdict on which loss to take."
    assert {note.verdict for note in (advice, *notes)} == {"none"}
    assert reason in advice.evidence
    assert remedy in advice.evidence
    assert "Ahead in these runs: smooth_topk_svm with" in advice.evidence
    assert [row[4] for row in found.tables[0].rows] == ["", "no verdict"]


def test_trials_that_tie_on_a_few_images_chose_nothing():
    """As on six classes with a tenth of 120 images: every trial is right on all twelve."""
    data = {**SMALL, "guess": {"top2": 33.3}}
    options = {"flags": {"loss_opt": {"k": 2}}}
    found = reported({"ce": 130.0, "topk_nll": 130.0}, data=data, images=12, options=options)
    advice = found.notes[0]
    assert advice.verdict == "none"
    assert "8 of 8 trials tie at 100.0 % on 12 validation images" in advice.evidence
    assert "--folds 5" in advice.evidence
    assert all("tie at 100.0 %" in row[-1] for row in found.tables[1].rows)


def test_losses_with_the_same_scores_are_not_told_apart():
    found = reported({"ce": 80.0, "log_taylor_softmax": 80.0}, spread=0.0, data=LARGE)
    assert [note.verdict for note in found.notes] == ["none", "none"]
    assert "tie on every seed" in found.notes[1].evidence


def test_a_loss_behind_that_was_tuned_at_an_edge_has_no_verdict_and_the_others_have():
    """The rate of cross-entropy goes to the edge by what its own trials say; the rest stays as it was."""
    study, records = finished(Options(losses=(*QUALITY, "focal")), {**QUALITY, "focal": 70.0}, data=LARGE)
    low = rates("adamw", TRIALS)[0]
    moved = []
    for record in records:
        flags = record.configuration["flags"]
        edge = flags["loss"] == "ce" and flags["seed"] != TUNING_SEED
        flags = {**flags, "lr": low} if edge else flags
        moved.append(replace(record, configuration={**record.configuration, "flags": flags}))
    advice, *notes = study.report(moved).notes
    assert advice.claim.startswith("Take smooth_topk_svm with")
    assert advice.verdict == "open"
    assert "It is surely better than focal. No verdict on ce" in advice.evidence
    assert [note.verdict for note in notes] == ["none", "agrees"]
    assert "Cross-entropy may do as well" in advice.evidence


def test_seeds_are_not_added_where_they_decide_nothing():
    alike = dict.fromkeys(QUALITY, 80.0)
    _, records = finished(Options(losses=tuple(alike), max_seeds=21), alike, data=SMALL)
    assert {len(choice.runs) for choice in compare.STUDY.choices(records)} == {5}


def test_two_seeds_have_no_interval():
    found = reported(QUALITY, options={"seeds": (0, 1)}, data=LARGE)
    assert "±" not in "".join(note.evidence for note in found.notes)
    assert "±" not in f"{found.tables[0].rows[1][1]}{found.tables[0].rows[1][3]}"
    assert "2 seeds, of 5 that a verdict needs" in found.notes[1].evidence


def test_k_is_that_of_the_losses_and_of_the_metric(ranked):
    _, records = finished(Options(losses=LOSSES, flags={"loss_opt": {"k": 2}}), dict.fromkeys(LOSSES, 80.0))
    for record in records:
        flags = record.configuration["flags"]
        assert flags["eval_metric"] == "top2"
        assert flags.get("loss_opt", {}).get("k") == (None if flags["loss"] in ("ce", "focal") else 2)
    # also where nobody says it
    for record in ranked[1]:
        flags = record.configuration["flags"]
        assert flags["eval_metric"] == "top5"
        assert flags.get("loss_opt", {}).get("k") == (None if flags["loss"] in ("ce", "focal") else 5)


def test_on_folds_every_trial_is_judged_on_each_part_of_the_data():
    study, records = finished(Options(losses=("ce",), folds=4), {"ce": 80.0}, data=LARGE)
    every = [record.configuration["flags"] for record in records]
    tried = [flags for flags in every if flags["seed"] == TUNING_SEED]
    assert {flags["val_split"] for flags in tried} == {"0.25"}
    by_trial = {}
    for flags in tried:
        by_trial.setdefault((flags["epochs"], flags["lr"]), []).append(flags.get("val_fold", 0))
    assert len(by_trial) == 8 + 4 + 2
    assert all(sorted(folds) == [0, 1, 2, 3] for folds in by_trial.values())
    assert study.choices(records)[0].trial["lr"] == min(rates("adamw", TRIALS), key=lambda lr: abs(lr - BEST_RATE))


def test_the_command_beside_the_advice_is_of_the_loss_that_it_names(ranked):
    study, records = ranked
    found = study.report(records)
    ((_, words),) = found.commands
    advised = found.notes[0].claim.removeprefix("Take ").split(" with ")
    assert f"--loss {advised[0]} " in words
    assert advised[1].split()[0].replace("=", " ") in words
    assert "--epochs 8" in words


@pytest.mark.parametrize("metric", ["top2", "macro_top3"])
def test_a_plan_counts_the_runs_by_any_metric(metric):
    runs = all_runs(compare.STUDY, Options(losses=("ce", "topk_nll"), flags={"eval_metric": metric}))
    assert len(runs) == 2 * (8 + 4 + 2 + 5)


def test_a_plan_says_minutes_and_the_metric():
    configuration = run_of(Options(flags={"loss_opt": {"k": 2}, "eval_metric": "top2"}), loss="topk_nll", seed=0)
    text = words("compare", [Kind(configuration, 1, 0.01, 90.0), Kind(configuration, 3, 0.01, 200.0)], 2)
    assert "by top-2; expected 12 min, 6 min with 2 side by side" in text
    assert "topk_nll k=2: 1 run of 8 epochs, 10.0 ms a step, 90 s a run" in text


def test_too_large_a_k_is_said_before_anything_runs():
    flags = {"dataset": "topk/hierarchy", "dataset_opt": {"size": 60, "superclasses": 2, "fine": 3}, "val_split": "0.2"}
    said = compare.STUDY.foreseen(Options(flags=flags))
    assert [line.partition(": ")[0] for line in said] == ["note"] * 2
    assert "top-5 of 6 classes" in said[0]
    assert "12 validation images: one is 8.3 points" in said[1]
    assert not compare.STUDY.foreseen(Options())


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
    argv = ["study", "compare", "--losses", "sharp_*", *TINY_FLAGS[:-2], "--max-seeds", "2", "--output", str(tmp_path)]
    assert main(argv) == 0
    assert "sharp_one with" in capsys.readouterr().out
    (summary,) = json.loads((tmp_path / "summary.json").read_text())
    assert {row[0] for row in summary["tables"][0]["rows"]} == {"sharp_one"}
    assert summary["failed"] == 0
    records = json.loads((tmp_path / "runs.json").read_text())
    tried = {record["configuration"]["flags"].get("loss_opt", {}).get("sharpness") for record in records}
    assert tried == {0.5, 1.0, 2.0}
