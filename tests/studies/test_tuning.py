"""Equal tuning budgets: who wins a grid, and on which split."""

import pytest

from topk_studies.engine.settings import RATES, TRIALS, reported_split, trials
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import choices, run_of, score, tuned_runs

from .conftest import trained


def history(validation, test):
    return [{"top5": a, "test_top5": b} for a, b in zip(validation, test, strict=True)]


def test_every_loss_has_as_many_trials():
    names = [*TRIALS, "ce", "their_loss"]
    assert {len(trials(Options(), name)) for name in names} == {len(RATES)}
    assert {len(trials(Options(budget="paper"), name)) for name in names} == {1}


def test_the_test_split_is_apart_from_the_one_that_chooses():
    assert reported_split(Options()) == "test"
    cifar = Options(flags={"dataset": "torch/cifar100"})
    configuration = run_of(cifar, loss="ce", seed=0)
    assert configuration["test_split"] == "validation"  # torchvision's test images
    assert configuration["flags"]["val_split"] == "0.1"  # of the training images
    assert reported_split(Options(test_split="holdout")) == "holdout"


def test_the_grid_comes_first_and_its_best_trial_runs_on_the_other_seeds():
    options = Options()
    grid = tuned_runs(options, [], "ce", (3, 4, 5))
    assert [c["flags"]["lr"] for c in grid] == list(RATES)
    assert {c["flags"]["seed"] for c in grid} == {3}
    # the second trial is best on the validation split, the last one on the test split: validation decides
    peaks = [(50, 60), (70, 61), (60, 62), (55, 90)]
    known = [trained(c, history([10, a], [10, b])) for c, (a, b) in zip(grid, peaks, strict=True)]
    wanted = tuned_runs(options, known, "ce", (3, 4, 5))
    assert wanted[: len(grid)] == grid
    assert [(c["flags"]["lr"], c["flags"]["seed"]) for c in wanted[len(grid) :]] == [(RATES[1], 4), (RATES[1], 5)]


def test_a_failed_trial_does_not_stop_the_others():
    from dataclasses import replace

    options = Options()
    grid = tuned_runs(options, [], "ce", (0, 1))
    known = [trained(c, history([i], [i])) for i, c in enumerate(grid)]
    known[-1] = replace(known[-1], result={}, error="it broke")
    assert [c["flags"]["lr"] for c in tuned_runs(options, known, "ce", (0, 1))[len(grid) :]] == [RATES[-2]]
    broken = [replace(record, result={}, error="it broke") for record in known]
    assert tuned_runs(options, broken, "ce", (0, 1)) == grid


def test_the_epoch_is_the_one_that_is_best_on_the_validation_split():
    record = trained({"flags": {}}, history([50, 80, 70], [90, 60, 95]))
    assert score(record, "top5") == 60
    assert score(record, "top5", "validation") == 80
    rows = [
        {"top5": 1.0, "test_top5": 2.0, "top1": 9.0, "test_top1": 3.0},
        {"top5": 5.0, "test_top5": 4.0, "top1": 8.0},
    ]
    assert score(trained({"flags": {}}, rows), "top1") == 3.0


def test_choices_hold_the_winner_and_its_scores():
    options = Options()
    grid = tuned_runs(options, [], "ce", (0, 1, 2))
    known = [trained(c, history([i], [10 * i])) for i, c in enumerate(grid)]
    wanted = tuned_runs(options, known, "ce", (0, 1, 2))
    known += [trained(c, history([1], [value])) for c, value in zip(wanted[len(grid) :], (36.0, 33.0), strict=True)]
    (choice,) = choices(known)
    assert choice.loss == "ce"
    assert choice.trial["lr"] == RATES[-1]
    assert choice.scores("top5") == {0: 30, 1: 36.0, 2: 33.0}
    assert choice.estimate("top5").mean == pytest.approx(33.0)
    assert len(choice.trials) == len(grid)
    assert choice.flags["dataset"] == "topk/hierarchy"
