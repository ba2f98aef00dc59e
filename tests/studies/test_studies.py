"""The studies: what they choose, compare and keep; and the published algorithms that they hold as references."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from topk_registry import create_loss
from topk_registry.train import TrainConfig
from topk_studies import glyphs, runner, studies
from topk_studies.baselines import smooth_topk_svm
from topk_studies.command import main, table_of

STUDY = studies.Study(
    "?", "-", {"a": {"noise": 0.0}}, (studies.Contestant("ce"), studies.Contestant("focal")), "top5", ("top5",)
)


def made_up(flags):
    """The best rate on the validation split is 1e-3; focal gains 2 points, give or take 1 by seed."""
    gain = (2.0 + flags["seed"] % 2) if flags["loss"] == "focal" else 0.0
    return {"top5": 50 + gain - abs(flags["lr"] - 1e-3) * 1000 + flags["seed"]}


def test_a_rate_is_chosen_on_validation_and_losses_are_compared_seed_by_seed(tmp_path):
    calls = []

    def train(flags):
        calls.append(flags)
        return made_up(flags)

    rows = runner.run(STUDY, {}, range(4), runner.Runs(tmp_path / "runs.jsonl", train))
    assert [row["chosen"]["lr"] for row in rows] == [1e-3, 1e-3]
    assert {flags["seed"] for flags in calls if flags["val_split"] == "validation"} == {runner.TUNING_SEED}
    assert {flags["seed"] for flags in calls if flags["val_split"] == "test"} == {0, 1, 2, 3}
    assert rows[1]["top5"]["difference"] == pytest.approx(2.5)
    assert rows[1]["top5"]["half_width"] == pytest.approx(3.182 * (1 / 3) ** 0.5 / 2, rel=1e-3)


@pytest.mark.slow
def test_runs_in_parallel_give_the_same_rows(tmp_path):
    rows = [runner.run(STUDY, {}, range(3), runner.Runs(tmp_path / f"{n}", made_up, jobs=n)) for n in (1, 2)]
    assert rows[0] == rows[1]
    again = runner.Runs(tmp_path / "2", None)
    assert (len(again.done), rows[0]) == (2 * (4 + 3), runner.run(STUDY, {}, range(3), again))


def test_a_run_that_diverges_is_not_chosen_and_a_result_that_diverges_has_no_mean(tmp_path):
    def diverges(flags):
        bad = flags["lr"] > 1e-3 if flags["loss"] == "ce" else flags["seed"] == 1
        return {} if bad else {"top5": flags["lr"]}

    rows = runner.run(STUDY, {}, range(3), runner.Runs(tmp_path / "runs.jsonl", diverges))
    assert rows[0]["chosen"]["lr"] == 1e-3
    assert [trial["top5"] for trial in rows[0]["tuning"]] == [0.00025, 0.0005, 0.001, None]
    assert rows[1]["top5"] == {"mean": None, "values": [0.002, 0.002]}


def test_a_lower_nll_is_better(tmp_path):
    study = studies.Study("?", "-", {"a": {}}, STUDY.contestants, "nll", ("nll",))
    rows = runner.run(study, {}, range(1), runner.Runs(tmp_path / "runs", lambda flags: {"nll": flags["lr"]}))
    assert rows[0]["chosen"]["lr"] == 0.00025


def test_an_interrupted_study_repeats_no_run(tmp_path):
    path, left = tmp_path / "runs.jsonl", 5

    def interrupted(flags):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return made_up(flags)

    with pytest.raises(KeyboardInterrupt):
        runner.run(STUDY, {}, range(2), runner.Runs(path, interrupted))
    with path.open("a") as file:
        file.write('{"flags": {"loss"')  # killed while it wrote
    again = []
    rows = runner.run(STUDY, {}, range(2), runner.Runs(path, lambda flags: again.append(flags) or made_up(flags)))
    assert len(again) == 2 * (4 + 2) - 5
    assert rows == runner.run(STUDY, {}, range(2), runner.Runs(tmp_path / "whole.jsonl", made_up))
    assert rows == runner.run(STUDY, {}, range(2), runner.Runs(path, None))


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_trial_is_a_run_that_the_trainer_accepts(name):
    study = studies.STUDIES[name]
    for contestant in study.contestants:
        trials = contestant.trials(study.trials, study.rates)
        assert len(trials) == 4 * len(contestant.options)
        for trial in trials:
            config = TrainConfig(**studies.DATA[study.data or "vectors"], **trial)
            if config.loss not in ("ce", "ldam", "noised_topk_imbalanced", "logit_adjustment"):  # need class counts
                create_loss(config.loss, **config.loss_opt)


@pytest.mark.slow
def test_the_command_trains_and_writes_a_document(tmp_path, capsys):
    path = tmp_path / "noise.json"
    small = studies.Study("?", "-", {"a": {"size": 400, "eval_size": 200}}, STUDY.contestants, "top5", ("top1", "top5"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(studies.STUDIES, "noise", small)
        assert main(["noise", "--epochs", "1", "--seeds", "1", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["loss"] for row in rows] == ["ce", "focal"]
    assert 0 < rows[0]["top5"]["mean"] < 100
    assert "difference" in rows[1]["top5"]
    assert len(Path(path.with_suffix(".runs.jsonl")).read_text().splitlines()) == 10
    assert "focal" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["summation", "divide and conquer", "algorithm 2"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_published_algorithms_agree_with_the_operator(algorithm, k):
    s = torch.randn(4, 12, dtype=torch.double, requires_grad=True)
    y = torch.tensor([0, 3, 7, 11])
    published = smooth_topk_svm(s, y, k=k, tau=0.5, algorithm=algorithm)
    ours = create_loss("smooth_topk_svm", k=k, tau=0.5)(s, y)
    # algorithm 2 is cut off at an order, and loses digits where it is
    torch.testing.assert_close(published, ours, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(loss, s)[0] for loss in (published, ours)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


def test_glyphs_are_tuned_on_the_tuning_seed_and_compared_seed_by_seed(tmp_path):
    def measured(run):
        gain = {"ce": 0.0, "smooth_topk_svm": 2.0 + run["seed"] % 2}.get(run["loss"], -1.0)
        options = run["loss_opt"].get("tau", 0.0) == 0.3
        value = 50 + gain + options + run["seed"] - abs(run["lr"] - 1e-2) * 1000
        return {"validation_top5": value, "test_top5": value}

    runs = runner.Runs(tmp_path / "runs.jsonl", measured)
    for run, seeds in glyphs.study(runs):
        assert run["lr"] == 1e-2
        for seed in seeds:
            runs({**run, "seed": seed})
    rows = glyphs.summary((json.loads(key), found) for key, found in runs.done.items())
    found = {(row["families"], row["noise"], row["loss"]): row for row in rows}
    row = found[60, "clean", "smooth_topk_svm, k=5, tau=0.3"]
    assert row["n"] == 8
    assert row["test_top5"]["minus ce"] == pytest.approx([3.5, 2.365 * (2 / 7) ** 0.5 / 8**0.5], abs=1e-3)
    assert found[150, "clean", "smooth_topk_svm, k=5, tau=0.3"]["n"] == 4
    assert "tau=0.3" in next(loss for *_, loss in found if "k=2" in loss)
    assert "minus ce" not in found[60, "clean", "ce"]["test_top5"]


def test_metrics_of_glyphs_are_those_of_numpy():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(62, (600,), generator=generator)
    logits = torch.randn(600, 62, generator=generator) + 2 * torch.eye(62)[labels]
    data = glyphs.Data(logits, labels)
    found = glyphs.measure(lambda part: part, data, data)
    order = np.argsort(-logits.numpy(), 1)
    for k in (1, 2, 3, 5):
        expected = 100 * (order[:, :k] == labels.numpy()[:, None]).any(1).mean()
        assert found[f"validation_top{k}"] == found[f"test_top{k}"] == pytest.approx(expected)
    assert 90 <= found["test_coverage"] < 92  # calibrated on the same images
    assert 1 < found["test_set_size"] < 62
    assert 0 < found["test_ece"] < 5


def test_a_table_of_results_shows_what_was_chosen_and_what_diverged():
    found = {"mean": 51.25, "difference": 1.5, "half_width": 0.25}
    tuning = [{"lr": rate} for rate in (0.1, 0.2, 0.3)]
    chosen = {"lr": 0.3, "loss_opt": {"gamma": 2}}
    rows = [
        {"condition": "a", "loss": "focal", "chosen": chosen, "tuning": tuning, "top5": found},
        {"condition": "a", "loss": "ce", "chosen": {**chosen, "lr": 0.2}, "tuning": tuning, "top5": {"mean": 50.0}},
        {"condition": "b", "loss": "ce", "chosen": None, "tuning": tuning, "top5": {"mean": None}},
    ]
    header, *lines, note = table_of(STUDY, rows).splitlines()
    assert header.split() == ["condition", "loss", "rates", "chosen", "top5"]
    assert [line.split() for line in lines] == [
        ["a", "focal", "3", "lr=0.3*", "gamma=2", "51.25", "(+1.50", "±", "0.25)"],
        ["a", "ce", "3", "lr=0.2", "gamma=2", "50.00"],
        ["b", "ce", "3", "lr=nan", "diverged"],
    ]
    assert note.startswith("* the lowest or the highest")


def test_uniform_noise_redraws_its_share_from_all_characters():
    drawn = glyphs.noisy(torch.zeros(40_000, dtype=torch.int64), "uniform", 0)
    share = drawn.bincount(minlength=62) / 40_000
    assert len(share) == 62
    assert (share[1:] - glyphs.SHARE / 62).abs().max() < 5 * (glyphs.SHARE / 62 / 40_000) ** 0.5
    assert share[0].item() == pytest.approx(1 - glyphs.SHARE * 61 / 62, abs=0.012)
    assert torch.equal(glyphs.noisy(drawn, "clean", 0), drawn)
    with pytest.raises(ValueError, match="must be one of confusion, clean, uniform, got 'other'"):
        glyphs.noisy(drawn, "other", 0)


def test_confusion_noise_redraws_within_groups_of_characters_that_look_alike():
    labels = torch.arange(62).repeat(200)
    drawn = glyphs.noisy(labels, "confusion", 0)
    changed = {
        (glyphs.CHARACTERS[a], glyphs.CHARACTERS[b])
        for a, b in zip(labels.tolist(), drawn.tolist(), strict=True)
        if a != b
    }
    assert changed == {(a, b) for group in glyphs.CONFUSED for a in group for b in group if a != b}
