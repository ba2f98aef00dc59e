"""``timm validate``: the accuracy that training printed, of the same weights on the same images."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from tests.system_calls import Calls
from tests.train.test_train import FOLDER
from topk_registry import registry
from topk_registry.cli import ticker
from topk_registry.cli.main import main
from topk_registry.data import open_dataset
from topk_registry.train import TrainConfig, Trainer, evaluate, evaluation
from topk_registry.train.checkpoint import LAST
from topk_registry.train.validate import create_parser, open_model

DATASET = partial(open_dataset, "topk/hierarchy", "validation", size=96, superclasses=4, fine=3)


def validate(tmp_path, *argv):
    file = tmp_path / "metrics.json"
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        status = main(["validate", *map(str, argv), "-j", "0", "--device", "cpu", "--json", str(file)])
    if status == 0:
        calls.check_written(file)
    return status, json.loads(file.read_text()) if status == 0 else None


@pytest.mark.parametrize(
    ("flags", "prefix"),
    [
        ((), "eval_"),
        (("--model-ema", "--model-ema-decay", "0.9"), "ema_"),
        (("--val-split", "0.25", "--crop-pct", "0.8", "--interpolation", "bicubic"), "eval_"),
        (("--normalize-classifier", "8"), "eval_"),
        (("--loss", "log_spherical_softmax"), "eval_"),
        (("--loss", "ldam", "--normalize-classifier", "1"), "eval_"),
        (("--loss", "topk_nll", "--loss-opt", "k=3", "tau=0.02", "--multi-crop", "5"), "eval_"),
    ],
    ids=str,
)
def test_one_checkpoint_has_one_accuracy(train, tmp_path, flags, prefix):
    run = train(*flags)
    status, metrics = validate(tmp_path, run.folder / LAST)
    assert status == 0
    assert metrics["weights"] == ("EMA" if prefix == "ema_" else "model")
    for name in ("nll", "top1", "top5", "macro_top5"):
        assert metrics[name] == pytest.approx(float(run.summary[-1][prefix + name]), abs=1e-4), name


@pytest.mark.parametrize(
    ("loss", "options", "temperature"),
    [("topk_nll", ("k=3", "tau=0.02"), 0.06), ("ldr_kl", ("temperature=3",), 1.0), ("ldam", (), 1.0)],
)
def test_the_temperature_of_marginals_is_that_of_training(train, monkeypatch, loss, options, temperature):
    run = train("--loss", loss, "--loss-opt", *options, "--epochs", "1")
    used = {}
    monkeypatch.setattr(evaluation, "evaluate", lambda model, loader, **options: used.update(options))
    open_model(run.folder / LAST, device="cpu", workers=0).evaluate(DATASET())
    assert used["temperature"] == pytest.approx(temperature)


def test_the_weights_themselves_by_a_flag(train, tmp_path):
    run = train("--model-ema")
    metrics = validate(tmp_path, run.folder / LAST, "--weights", "model")[1]
    assert metrics["weights"] == "model"
    assert metrics["nll"] == pytest.approx(float(run.summary[-1]["eval_nll"]), abs=1e-4)


def test_other_set_sizes_and_other_preprocessing(train, tmp_path):
    run = train()
    metrics = validate(tmp_path, run.folder / LAST, "--k", "3", "--crop-pct", "0.5")[1]
    assert "crop 0.5" in metrics["prepared"]
    assert {"top3", "macro_top3", "ece"} <= {*metrics}


def test_errors_are_two_with_a_reason(train, tmp_path, capsys, monkeypatch):
    assert validate(tmp_path, tmp_path / "nothing.pth.tar")[0] == 2
    run = train()
    torch.save(run.checkpoint()["state_dict"], tmp_path / "weights.pth")
    assert validate(tmp_path, tmp_path / "weights.pth")[0] == 2
    assert "--model" in capsys.readouterr().err
    other = tmp_path / "other.pth"
    for content, reason in (
        (b"", "it is empty"),
        ([1], "it contains a list"),
        ({"model": "resnet18"}, "it contains a str"),
        (torch.nn.ReLU(), "it contains a torch.nn.modules.activation.ReLU, which can run code"),
    ):
        other.write_bytes(content) if isinstance(content, bytes) else torch.save(content, other)
        assert validate(tmp_path, other, "--model", "topk_convnet")[0] == 2
        assert f"{other} is not a checkpoint: {reason}" in capsys.readouterr().err
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "onnx")
    (tmp_path / "model.onnx").touch()
    assert validate(tmp_path, tmp_path / "model.onnx")[0] == 2
    assert "is disabled by TOPK_REGISTRY_DISABLE" in capsys.readouterr().err


def test_images_other_than_those_that_were_named_are_not_evaluated(train, folder, tmp_path, capsys):
    run = train(folder, *FOLDER, tiny=())
    assert validate(tmp_path, run.folder / LAST, folder)[1]["images"] == 12
    assert validate(tmp_path, run.folder / LAST, "--split", "test")[0] == 2
    assert "no split 'test'; it has train, validation" in capsys.readouterr().err
    assert validate(tmp_path, train(name="built_in").folder / LAST, folder)[0] == 2
    assert "takes no directory" in capsys.readouterr().err


def test_a_model_for_comparisons(train):
    run = train()
    opened, seen = open_model(run.folder / LAST, device="cpu", workers=0), []
    dataset = DATASET()
    opened.evaluate(dataset, keep=lambda scores, labels: seen.append((scores.shape, len(labels))))
    assert sum(labels for _, labels in seen) == len(dataset)
    assert {shape[1] for shape, _ in seen} == {12}


def test_at_most_25_flags():
    assert len(create_parser()._actions) - 1 <= 25


def test_a_run_on_batches_of_a_program_names_no_data(tmp_path, capsys):
    """Its checkpoint is evaluated on data that a flag names."""
    batches = [(torch.randn(4, 3, 32, 32), torch.arange(4))] * 2
    settings = {"model": "topk_convnet", "model_kwargs": {"width": 4}, "num_classes": 12, "epochs": 1, "lr": 0.01}
    config = TrainConfig(**settings, warmup_epochs=0, device="cpu", output=str(tmp_path), experiment="run")
    path = Trainer(config, train_loader=batches, quiet=True).fit().folder / LAST
    assert validate(tmp_path, path)[0] == 2
    assert "specify the data" in capsys.readouterr().err
    data = ("--dataset", "topk/hierarchy", "--dataset-opt", "size=24", "superclasses=4", "fine=3")
    assert validate(tmp_path, path, *data)[1]["images"] == 24


def test_a_file_in_the_format_of_a_plug_in(tmp_path, monkeypatch, capsys):
    class Favorites:
        """A model whose file holds the class that it always predicts."""

        class_names = None

        def __init__(self, path, running):
            self.favorite = int(path.read_text())

        def run(self, images, keep):
            for _, label in images.dataset:
                keep(np.eye(4, dtype=np.float32)[[self.favorite]], np.array([label]))

    monkeypatch.setattr(registry.model_files, "_registered", {})
    registry.model_files.register("favorite")(Favorites)
    file = tmp_path / "model.favorite"
    file.write_text("2")
    status, metrics = validate(tmp_path, file, "--dataset", "topk/hierarchy", "--dataset-opt", "size=40", "fine=2",
                               "superclasses=2")  # fmt: skip
    assert (status, metrics["images"], metrics["weights"]) == (0, 40, "FAVORITE")
    assert metrics["top1"] == pytest.approx(25, abs=3)
    for flags in (("--mean", "0"), ("--multi-crop", "5"), ("--amp",), ("--num-classes", "4"), ("--loss", "focal")):
        assert validate(tmp_path, file, "--dataset", "topk/hierarchy", *flags)[0] == 2
        assert f"{flags[0]}: without effect" in capsys.readouterr().err


def test_a_loss_that_cannot_be_built_is_an_error(train, tmp_path, capsys):
    run = train("--loss", "ldam", "--epochs", "1")
    saved = run.checkpoint()
    saved["args"].loss = "gone_loss"
    torch.save(saved, other := tmp_path / "other.pth.tar")
    assert validate(tmp_path, other)[0] == 2
    assert "gone_loss" in (printed := capsys.readouterr().err)
    assert "--loss ce" in printed
    assert validate(tmp_path, other, "--loss", "ce")[0] == 0


def test_validate_takes_another_loss_and_any_batch_size(train, tmp_path, capsys):
    run = train("--loss", "topk_nll", "--loss-opt", "k=3", "--mixup", "0.2", "--epochs", "1")
    capsys.readouterr()
    assert validate(tmp_path, run.folder / LAST, "--loss", "ldam", "-b", "31")[0] == 0, capsys.readouterr().err


def test_a_checkpoint_of_timms_script_is_evaluated(train, tmp_path):
    run = train("--epochs", "1")
    saved = run.checkpoint()
    vars(saved["args"]).update(prefetcher=True, distributed=False, local_rank=0, world_size=1, log_wandb=True)
    del saved["args"].loss
    torch.save(saved, other := tmp_path / "script.pth.tar")
    status, metrics = validate(tmp_path, other)
    assert status == 0
    assert metrics["top1"] == pytest.approx(float(run.summary[-1]["eval_top1"]), abs=1e-4)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("crops", [(), ("--multi-crop", "5")])
def test_unreadable_images_do_not_count_and_their_number_is_reported(train, folder, tmp_path, capsys, crops):
    run = train(folder, *FOLDER, *crops, tiny=())
    broken = [folder / "validation" / "blue" / "1.png", folder / "validation" / "red" / "3.png"]
    contents = [path.read_bytes() for path in broken]
    for path in broken:
        path.write_bytes(b"no image")
    damaged = train(folder, *FOLDER, *crops, name="damaged", tiny=())
    assert "left out 2" in damaged.out
    assert damaged.summary[-1]["eval_left_out"] == "2.0"
    found = validate(tmp_path, run.folder / LAST, folder)[1]
    assert "blue/1.png" in capsys.readouterr().err
    for path in broken:
        path.unlink()
    expected = validate(tmp_path, run.folder / LAST, folder)[1]
    assert expected["images"] == 10
    assert "left_out" not in expected
    assert found.pop("left_out") == 2
    assert found == pytest.approx(expected)
    for name in ("nll", "top1"):
        assert float(damaged.summary[-1][f"eval_{name}"]) == pytest.approx(expected[name], abs=1e-4)
    for path, content in zip(broken, contents, strict=True):
        path.write_bytes(content)
    assert validate(tmp_path, run.folder / LAST, folder)[1]["images"] == 12


def test_k_hot_targets_of_unreadable_images_do_not_count():
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(6, 4, generator=generator), (torch.rand(6, 4, generator=generator) > 0.5).float()
    broken = target.clone()
    broken[1] = -100
    kept = [0, 2, 3, 4, 5]
    options = {"num_classes": 4, "k": (1,), "multilabel": True}
    found = evaluate(torch.nn.Identity(), [(logits[:3], broken[:3]), (logits[3:], broken[3:])], **options, device="cpu")
    assert found.pop("left_out") == 1
    assert found == pytest.approx(
        evaluate(torch.nn.Identity(), [(logits[kept], target[kept])], **options, device="cpu")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--checkpoint", "x.pth"), "the checkpoint is the first argument"),
        (("--checkpoint=x.pth", "images"), "the checkpoint is the first argument"),
        (("x.pth", "--use-ema"), "--weights ema, which is the default"),
        (("x.pth", "--data-dir", "images"), "the directory is the second argument"),
        (("x.pth", "--results-file", "x.csv"), "--json FILE"),
    ],
)
def test_flags_of_timms_script_name_their_equivalent(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(["validate", *words])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_calibration_error_is_that_of_the_first_class(train, capsys):
    run = train()
    opened, batches = open_model(run.folder / LAST, device="cpu", workers=0), []
    opened.evaluate(DATASET(), keep=lambda *batch: batches.append(batch))
    scores, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    confidence, predicted = scores.softmax(1).max(1)
    bins = (15 * confidence).long()
    gaps = [((predicted == labels).float() - confidence)[bins == b].sum().abs() for b in range(15)]
    assert main(["validate", str(run.folder / LAST), "-j", "0", "--device", "cpu"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "calibration" in line)
    assert line.split("  ")[0] == "top-1 calibration error (ECE)"
    assert float(line.split()[-2]) == pytest.approx(100 * sum(gaps).item() / len(labels), abs=0.01)


def test_validate_says_what_it_is_doing(train, tmp_path, capsys, monkeypatch):
    run = train("--epochs", "1")
    monkeypatch.setattr("topk_registry.train.validate.ticker", lambda: ticker(0))
    capsys.readouterr()
    assert validate(tmp_path, run.folder / LAST, "-b", "32")[0] == 0
    said = capsys.readouterr().err
    for text in ("loading torch", "evaluating 96 images", "2 batches of 32"):
        assert text in said


def test_a_ticker_speaks_at_most_every_few_seconds(capsys, monkeypatch):
    clock = iter([0.0, 2.9, 3.0, 3.1, 5.9, 6.2, 6.3])
    monkeypatch.setattr("topk_registry.cli.time.monotonic", lambda: next(clock))
    tick = ticker(3.0)
    for name in "abcd":
        tick(name)
    assert capsys.readouterr().err.split() == ["b", "d"]
