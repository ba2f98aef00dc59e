"""``timm validate``: a checkpoint of a run gives the run's own metrics again."""

import csv
import json

import pytest

from topk_registry.cli.main import main

CPU = ("--device", "cpu", "-j", "0", "-b", "32")


@pytest.fixture
def validate(capsys):
    def run(*argv):
        capsys.readouterr()
        status = main(["validate", *map(str, argv), *CPU])
        printed = capsys.readouterr()
        return status, json.loads(printed.out.partition("--result\n")[2] or "null"), printed.err

    return run


def assert_agrees(results, row):
    for name, value in row.items():
        if name.startswith("eval_"):
            assert results[name.removeprefix("eval_")] == pytest.approx(value, abs=1e-4), name


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss", "smooth_topk_svm"],
        ["--val-split", "0.25", "--long-tail", "exp", "--imbalance-factor", "8", "--eval-metric", "few-top1"],
        ["--normalize-classifier", "20", "--learn-scale"],
    ],
    ids=["plain", "held out, long tail", "cosine classifier"],
)
def test_a_checkpoint_tells_all_there_is_to_know(train, validate, flags):
    run = train(*flags)
    status, results, err = validate("--checkpoint", run.folder / "last.pth.tar")
    assert status == 0, err
    assert_agrees(results, run.summary[-1])
    assert results["model"] == "topk_convnet"
    assert results["top1_err"] == pytest.approx(100 - results["top1"], abs=1e-3)


def test_the_moving_average_is_asked_for(train, validate):
    run = train("--model-ema", "--model-ema-decay", "0.5")
    _, averaged, _ = validate("--checkpoint", run.folder / "last.pth.tar", "--use-ema")
    _, plain, _ = validate("--checkpoint", run.folder / "last.pth.tar")
    assert_agrees(averaged, run.summary[-1])
    assert plain["loss"] != averaged["loss"]


def test_other_sizes_other_data_and_crops(train, validate):
    run = train("--loss", "topk_nll", "--loss-opt", "k=3", "--epochs", "4")
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar")
    _, results, _ = validate(*checkpoint, "--topk", "2", "3")
    assert results["top1"] <= results["top2"] <= results["top3"] <= results["top5"]
    _, trained, _ = validate(*checkpoint, "--split", "train")
    assert trained["loss"] < results["loss"]
    status, crops, err = validate(*checkpoint, "--multi-crop", "10")
    assert status == 0, err
    assert crops["top1"] > 100 / 12
    assert crops["top5"] != results["top5"] or crops["loss"] != results["loss"]


@pytest.mark.parametrize("form", ["csv", "json"])
def test_results_file(train, validate, tmp_path, form):
    run = train("--epochs", "1")
    path = tmp_path / "results"
    _, results, _ = validate(
        "--checkpoint", run.folder / "last.pth.tar", "--results-file", path, "--results-format", form
    )
    written = json.loads(path.read_text()) if form == "json" else next(csv.DictReader(path.read_text().splitlines()))
    assert float(written["top1"]) == results["top1"]


def test_a_missing_plug_in_is_said_and_scores_rank(train, register, validate):
    import torch

    register("gone", torch.nn.CrossEntropyLoss)
    run = train("--loss", "gone", "--epochs", "1")
    from topk_registry import registry

    registry.losses.unregister("gone")
    status, results, err = validate("--checkpoint", run.folder / "last.pth.tar")
    registry.register_loss("gone")(torch.nn.CrossEntropyLoss)
    assert status == 0
    assert "ranked by their scores alone" in err
    assert_agrees(results, run.summary[-1])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--checkpoint", "/no/such.pth.tar"], "there is no checkpoint"),
        (["--model", "topk_convnet"], "name the data"),
        (["--model", "topk_convnet", "--data-dir", "/no/such/place"], "does not exist"),
    ],
)
def test_what_cannot_be_validated_says_why(validate, argv, message):
    status, _, err = validate(*argv)
    assert status == 2
    assert message in err


def test_a_checkpoint_of_another_model_is_refused(train, validate):
    run = train("--epochs", "1")
    status, _, err = validate("--checkpoint", run.folder / "last.pth.tar", "--model-kwargs", "width=6")
    assert status == 2
    assert "cannot load" in err


@pytest.mark.parametrize("score", ["raps", "log-odds"])
def test_prediction_sets(train, validate, score):
    options = () if score == "raps" else ("--sets-opt", "k=3")
    run = train("--epochs", "1")
    data = ("--dataset-opt", "superclasses=4", "fine=3", "noise=1.0", "eval_size=400")
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar", *data)
    status, results, err = validate(*checkpoint, "--sets", score, "--alpha", "0.2", *options)
    assert status == 0, err
    # calibrated and measured on about 180 each: five standard deviations of the difference are 0.2
    assert 60 < results["set_coverage"] <= 100
    assert results["set_coverage_low"] <= results["set_coverage"] <= results["set_coverage_high"]
    assert 1 <= results["set_mean_size"] <= 12
    assert ("set_penalty" in results) == (score == "raps")
    _, plain, _ = validate(*checkpoint)
    assert plain["top1"] == results["top1"]
    assert not [name for name in plain if name.startswith("set_")]


def test_sets_that_cannot_be_say_why(train, validate):
    run = train("--epochs", "1")
    checkpoint = ("--checkpoint", run.folder / "last.pth.tar")
    for flags, message in (
        (("--sets", "rasp"), "no score is called 'rasp'"),
        (("--sets", "lac", "--alpha", "1.5"), "must be above 0 and below 1"),
        (("--sets", "lac", "--alpha", "0.0001"), "too few for alpha = 0.0001: it takes 9999"),
    ):
        status, _, err = validate(*checkpoint, *flags)
        assert status == 2
        assert message in err
