"""A training run of a study is the trainer's, measured on the test split besides."""

import csv
import json
import signal

import pytest

from tests.train.conftest import image_folder, unclosed_files  # noqa: F401  a fixture
from topk_registry.cli.main import main
from topk_studies.engine import training
from topk_studies.engine.study import ConfigurationError, Options
from topk_studies.engine.tuning import run_of

from .conftest import TINY

pytestmark = pytest.mark.usefixtures("one_thread")


def quiet(share, words):
    pass


def test_it_is_the_run_of_the_command_that_it_names(tiny, tmp_path, capsys):
    configuration = run_of(
        tiny, loss="smooth_topk_svm", seed=1, lr=0.01, loss_opt={"k": 3, "tau": 0.5}, label_noise=0.3
    )
    history = training.run(configuration, tmp_path / "work", quiet)["history"]
    argv = training.arguments(configuration)
    assert training.command(configuration).startswith("timm train ")
    assert main(["train", *argv, "--output", str(tmp_path), "--experiment", "plain"]) == 0
    with open(tmp_path / "plain" / "summary.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(history) == 2
    for row, ours in zip(rows, history, strict=True):
        for name in ("train_loss", "eval_top1", "eval_top5", "eval_nll"):
            assert ours[name.removeprefix("eval_")] == pytest.approx(float(row[name]), rel=1e-5)
    capsys.readouterr()
    # and its numbers of the test split are those of the command that evaluates a checkpoint
    best = max(history, key=lambda row: row["top5"])
    checkpoint = str(tmp_path / "plain" / "model_best.pth.tar")
    assert main(["validate", "--checkpoint", checkpoint, "--split", "test", "--device", "cpu", "-j", "0"]) == 0
    result = json.loads(capsys.readouterr().out.partition("--result\n")[2])
    assert best["test_top5"] == pytest.approx(result["top5"], abs=1e-3)
    assert best["test_top1"] == pytest.approx(result["top1"], abs=1e-3)


def test_it_tells_how_sparse_the_gradient_is(tiny, tmp_path):
    dense = training.run(run_of(tiny, loss="ce", seed=0, lr=1e-3), tmp_path / "ce", quiet)["history"]
    sparse = training.run(run_of(tiny, loss="topk_hinge", seed=0, lr=1e-3), tmp_path / "hinge", quiet)["history"]
    assert all(row["nonzero"] == 1 for row in dense)
    assert all(0 < row["nonzero"] <= 2 / 12 + 1e-6 for row in sparse)
    assert all(0 <= row["train_top1"] <= row["train_top5"] <= 100 for row in dense + sparse)


def test_what_the_trainer_refuses_is_told_without_a_traceback(tiny, tmp_path):
    for flags in (
        {"loss": "no_such_loss"},
        {"loss": "topk_nll", "loss_opt": {"k": 12}},
        {"loss": "ce", "model": "nonet"},
    ):
        with pytest.raises((ConfigurationError, LookupError)):
            training.run(run_of(tiny, seed=0, lr=1e-3, **flags), tmp_path / "work", quiet)


@unclosed_files
def test_an_image_folder_has_its_epochs_chosen_on_held_out_training_images(image_folder, tmp_path):  # noqa: F811
    flags = {**TINY, "dataset": "", "dataset_opt": {}, "data_dir": str(image_folder), "num_classes": 4}
    flags |= {"eval_metric": "top1"}
    configuration = run_of(Options(flags=flags, device="cpu"), loss="topk_nll", seed=0, lr=1e-3, loss_opt={"k": 2})
    args = training.arguments(configuration)
    assert args[args.index("--val-split") + 1] == "0.1"
    assert configuration["test_split"] == "validation"
    history = training.run(configuration, tmp_path / "work", quiet)["history"]
    # 4 held-out images, 1 of each class, and 24 of the validation folder
    assert all(row["top1"] % 25 == 0 for row in history)
    assert all(
        row["test_top1"] * 24 / 100 == pytest.approx(round(row["test_top1"] * 24 / 100), abs=1e-3) for row in history
    )


def test_neutral_flags_are_left_out_so_that_studies_share_runs(tiny):
    plain = run_of(tiny, loss="ce", seed=0, lr=1e-3)
    assert run_of(tiny, loss="ce", seed=0, lr=1e-3, label_noise=0.0, subset=1.0) == plain
    assert run_of(tiny, loss="ce", seed=0, lr=1e-3, loss_opt={}) == plain
    assert run_of(tiny, loss="ce", seed=0, lr=1e-3, label_noise=0.5) != plain


def test_the_users_flags_come_last(tiny):
    flags = run_of(tiny, loss="ce", seed=0, lr=1e-3, epochs=99)["flags"]
    assert flags["epochs"] == 2
    assert flags["dataset_opt"] == tiny.flags["dataset_opt"]


@pytest.fixture
def interruptible():
    """Python's own handler, as a worker has it, also where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_goes_on_where_it_stopped(tiny, tmp_path):
    configuration = run_of(tiny, loss="ce", seed=0, lr=1e-3)
    configuration["flags"]["epochs"] = 6
    whole = training.run(configuration, tmp_path / "whole", quiet)

    def stop_in_the_third(share, words):
        if "epoch 3/6" in words:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        training.run(configuration, tmp_path / "work", stop_in_the_third)
    assert (tmp_path / "work" / "run" / "last.pth.tar").exists()
    told = []
    resumed = training.run(configuration, tmp_path / "work", lambda share, words: told.append(words))
    assert not any("epoch 1/6" in words or "epoch 2/6" in words for words in told), told  # they are not done again
    assert [row["test_top5"] for row in resumed["history"]] == [row["test_top5"] for row in whole["history"]]


def test_excess_risk_is_measured_where_the_posterior_is_known(tmp_path):
    from topk_registry.data.ambiguous import Ambiguous

    sizes = {"size": 300, "families": 3, "fine": 4, "side": 4, "noise": 2.0}
    flags = {
        "dataset": "topk/ambiguous",
        "dataset_opt": sizes,
        "model_kwargs": {"side": 4},
        "epochs": 4,
        "val_interval": 1,
    }
    options = Options(flags={**flags, "batch_size": 50, "warmup_epochs": 0}, device="cpu")
    history = training.run(run_of(options, loss="ce", seed=0, lr=3e-3), tmp_path / "work", quiet)["history"]
    assert all(row["test_excess_top1"] > 0 and row["test_excess_top5"] > 0 for row in history)
    assert history[-1]["test_excess_top5"] < history[0]["test_excess_top5"]
    # sets that miss a label in ten, over the 150 samples that did not calibrate them: within four deviations
    assert all(1 <= row["test_set_mean_size"] <= 12 for row in history)
    assert history[-1]["test_set_mean_size"] < history[0]["test_set_mean_size"]
    assert history[-1]["test_set_coverage"] == pytest.approx(90, abs=4 * 100 * (2 * 0.09 / 150) ** 0.5)
    assert all(0 < row["test_calibration_top5"] < 2 for row in history)
    # the error on the drawn labels is Bayes' error and the excess, but for the labels' chance
    least = Ambiguous("test", **sizes).bayes_error(5)
    error = 1 - history[-1]["test_top5"] / 100
    assert error == pytest.approx(least + history[-1]["test_excess_top5"] / 100, abs=4 * (0.25 / 300) ** 0.5)
