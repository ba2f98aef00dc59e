"""A whole run: what it prints, writes and learns."""

import csv
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torchvision.datasets import FakeData

from tests.train.conftest import TINY
from topk_registry import registry
from topk_registry.train import TrainConfig, Trainer, TrainError, evaluate

FOLDER = ("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "8", "-j", "0", "--device", "cpu")
FOLDER += ("--epochs", "2", "--warmup-epochs", "0", "--opt", "adamw", "--lr", "0.01", "--input-size", "3", "32", "32")


@pytest.mark.parametrize("loss", ["ce", "smooth_topk_svm"])
def test_training_learns_and_writes(train, loss):
    run = train("--loss", loss, "--epochs", "8", "--dataset-opt", "size=480", "noise=0.0")
    assert run.status == 0
    losses = [float(row["train_loss"]) for row in run.summary]
    assert losses[-1] < 0.7 * losses[0]
    assert float(run.summary[-1]["eval_top5"]) > 60  # a guess: 5 of 12 classes
    names = {path.name for path in run.folder.iterdir()}
    assert {"last.pth.tar", "model_best.pth.tar", "args.yaml", "classes.txt"} <= names
    assert ("curves.svg" in names) == (find_spec("matplotlib") is not None)
    settings = yaml.safe_load((run.folder / "args.yaml").read_text())
    assert settings["num_classes"] == 12
    assert settings["input_size"] == [3, 32, 32]
    assert vars(run.checkpoint()["args"])["crop_pct"] == 1.0


def test_plan_and_progress_without_a_terminal(train):
    run = train("--loss", "smooth_topk_svm", "--loss-opt", "tau=0.5")
    for text in (
        "tau=0.5",
        "(default: ",
        "alpha=",
        "k=5",
        "32x32",
        "crop 1",
        "[1/6]",
        "[6/6]",
        "Test:",
        "loading torch",
    ):
        assert text in run.out, text


BUILT_IN = ("--dataset-opt", "size=480", "superclasses=4", "fine=3", "--model", "topk_convnet", "-b", "16")
BUILT_IN += ("--model-kwargs", "width=4", "--epochs", "2", "--lr", "0.01")


def test_the_built_in_job_ends_with_a_comparison_with_cross_entropy(train):
    run = train("--loss", "smooth_topk_svm", *BUILT_IN, tiny=("--device", "cpu"))
    assert run.status == 0, run.err
    table = run.out.partition("for comparison:")[2]
    other = [*csv.DictReader((run.folder / "cross_entropy" / "summary.csv").read_text().splitlines())]
    for rows, column in ((run.summary, 1), (other, 2)):
        best = max(rows, key=lambda row: float(row["eval_top5"]))
        for name in ("top-1", "top-5"):
            line = next(line for line in table.splitlines() if line.startswith(f"{name} "))
            shown = re.findall(r"[\d.]+ %", line)[column - 1]
            assert shown == f"{float(best['eval_' + name.replace('-', '')]):.2f} %"
    assert "NLL at a fitted temperature" in table
    assert yaml.safe_load((run.folder / "cross_entropy" / "args.yaml").read_text())["epochs"] == 2
    assert "can be chance" in table.splitlines()[-2]
    assert "labels of the built-in data are clean; --dataset-opt noise=0.4" in table.splitlines()[-1]


@pytest.mark.parametrize("flags", [("--loss", "ce"), ("--loss", "focal", "--dataset", "topk/hierarchy")])
def test_there_is_no_comparison_with_itself_or_on_data_that_were_named(train, flags):
    run = train(*flags, *BUILT_IN, "--epochs", "1", tiny=("--device", "cpu", "-j", "0"))
    assert run.status == 0, run.err
    assert "for comparison:" not in run.out


def test_a_k_above_half_of_the_classes_is_noted(train):
    assert "8 random classes contain" in train("--loss", "smooth_topk_svm", "--loss-opt", "k=8", "--dry-run").out


def test_the_same_seed_gives_the_same_weights(train):
    one, two = (train("--loss", "noised_topk", name=name).checkpoint()["state_dict"] for name in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_ema_is_evaluated_beside_the_weights_and_warned_of(train):
    run = train("--model-ema")
    assert "few for --model-ema-decay" in run.out
    assert "Test (EMA)" in run.out
    assert {"eval_top1", "ema_top1"} <= {*run.summary[-1]}
    saved = run.checkpoint()
    assert {*saved["state_dict"]} == {*saved["state_dict_ema"]}
    assert saved["metric"] == pytest.approx(float(run.summary[-1]["ema_top1"]))


@pytest.mark.parametrize(
    "flags",
    [
        ("--mixup", "0.4", "--loss", "focal"),
        ("--mixup", "0.4", "--cutmix", "1", "--loss", "smooth_topk_svm"),
        ("--mixup", "0.4", "--mixup-off-epoch", "1"),
        ("--class-weight", "inv_freq"),
        ("--class-weight", "effective_num", "--loss", "focal"),
        ("--class-weight", "inv_freq", "--mixup", "0.4"),
        ("--grad-accum-steps", "4", "--clip-grad", "1"),
        ("--amp",),
        ("--sampler", "class_balanced", "--dataset-opt", "long_tail=10"),
        ("--multi-crop", "5", "--input-size", "3", "28", "28"),
        ("--normalize-classifier", "16", "--learn-scale", "--loss", "ldam"),
        ("--task", "multilabel", "--dataset", "topk/several", "--loss", "bce"),
        ("--val-split", "0.2", "--eval-metric", "macro-top3"),
        ("--reprob", "0.5", "--channels-last", "--val-interval", "2"),
    ],
    ids=lambda flags: " ".join(flags),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flags_train(train, flags):
    own_data = "topk/several" in flags
    run = train(
        *flags, tiny=[word for word in TINY if not own_data or "=" not in word or word in ("width=4", "size=96")]
    )
    assert run.status == 0, run.err
    assert all(np.isfinite(float(row["train_loss"])) for row in run.summary)
    assert own_data == ("best      by mAP: default of --task multilabel" in run.out)


def test_warning_of_slow_bfloat16(train):
    assert "without instructions for bfloat16" in train("--amp", "--dry-run").out
    assert "without instructions" not in train("--dry-run").out


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--device", "cuda:9"), "CUDA"),
        (("--model", "resnet1"), "did you mean resnet10t, resnet14t, "),
        (("--loss", "ldam", "--class-weight", "1,2"), "12"),
        (("--class-weight", "invfreq"), "inv_freq"),
        (("--loss", "focal", "--loss-opt", "gama=2"), "gamma"),
        (("--num-classes", "3"), "--num-classes"),
        (("--opt", "nothing"), "optimizer"),
        (("--sched", "nothing"), "schedule"),
        (("--aa", "nothing"), "--aa"),
        (("--resume", "nowhere.pth.tar"), "no such file"),
        (("--resume", "nowhere.pth.tar", "--dry-run"), "no such file"),
        (("--dataset-opt", "sice=3"), "size"),
        (("-b", "1000"), "--batch-size"),
        (("--initial-checkpoint", "nowhere.pth"), "no such file"),
        (("--initial-checkpoint", "FILE"), "not a checkpoint: torch.load fails"),
        (("--pretrained-path", "FILE"), "not a checkpoint: torch.load fails"),
        (("--resume", "FILE"), "not a checkpoint: torch.load fails"),
        (("--loss", "focal", "--smoothing", "0.1", "--loss-opt", "label_smoothing=0.2"), "both"),
        (("--task", "multilabel", "--loss", "focal"), "takes_k_hot"),
        pytest.param(("--torchcompile", "nothing"), "--torchcompile nothing: Invalid backend", marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_runs_that_cannot_begin(train, flags, word):
    tiny = tuple(word for word in TINY if word != "--no-aug") if "--aa" in flags else TINY
    run = train(*(__file__ if flag == "FILE" else flag for flag in flags), tiny=tiny)
    assert run.status == 2, run.out
    assert word in run.err
    assert not run.folder.exists()


def test_cuda_without_cuda_is_an_error(train, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA" in train("--device", "cuda").err


def test_a_loss_that_becomes_infinite_ends_the_run(train):
    run = train("--lr", "1e30")
    assert run.status == 1
    assert "--lr" in run.err


def test_the_folder_of_another_run_is_not_overwritten(train):
    train("--epochs", "1")
    second = train("--epochs", "1")
    assert second.status == 2
    assert "--overwrite" in second.err
    assert train("--epochs", "1", "--overwrite").status == 0


def test_early_stop(train):
    run = train("--epochs", "50", "--lr", "0", "--early-stop", "2")
    assert "stopped early" in run.out
    assert len(run.summary) == 3


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_folder_of_images(train, folder):
    run = train(folder, *FOLDER, tiny=())
    assert run.status == 0, run.err
    assert (folder.parent / "run" / "classes.txt").read_text().split() == ["blue", "green", "red"]


def test_other_formats_are_counted(train, folder):
    for i in range(5):
        Image.new("RGB", (40, 40)).save(folder / "train" / "red" / f"more{i}.webp")
        Image.new("RGB", (40, 40)).save(folder / "validation" / "red" / f"more{i}.gif")
    for flags, status in ((["--dry-run"], 0), (["--batch-size", "1000"], 2)):  # also before a complaint
        run = train(folder, *FOLDER, *flags, tiny=())
        assert run.status == status
        assert all(f"skipped 5 {kind} files" in run.out for kind in (".webp", ".gif"))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("flags", [(), ("--aa", "rand-m10-n9-inc1", "-j", "1"), ("--multi-crop", "5")])
def test_images_with_one_channel(train, folder, flags):
    model = ("--model", "resnet10t", "--in-chans", "1", "--img-size", "32", "--epochs", "1", *FOLDER[4:-4])
    assert train(folder, *model, *flags, tiny=()).status == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--in-chans", "4"], "its images have 1 channels (L), and the model takes 4; see --in-chans"),
        (["--input-img-mode", "L"], "1 channels (L), and the model takes 3"),
        (["--mean", "0.5", "0.5"], "--mean and --std take one number, or one number per channel"),
    ],
)
def test_images_that_do_not_fit_the_model_are_an_error(train, folder, flags, words):
    run = train(folder, *FOLDER[:-4], *flags, tiny=())
    assert (run.status, words in run.err) == (2, True), run.err


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_unreadable_images_end_the_run_with_a_message(train, folder):
    for path in sorted((folder / "train").rglob("*.png"))[1:]:
        Image.fromarray(np.full((40, 40), 40000, np.uint16)).save(path)
    run = train(folder, *FOLDER, "-j", "1", tiny=())
    assert re.match("timm train: cannot read the data: .*10 consecutive images", run.err.splitlines()[-1])


@pytest.mark.parametrize("kept", [True, False])
def test_the_number_of_classes_without_class_names(train, monkeypatch, kept):
    def unnamed(split="train"):
        data = FakeData(16, (3, 32, 32), num_classes=4)
        data.targets = [data[i][1] for i in range(16)] if kept else None
        return data

    monkeypatch.setattr(registry.datasets, "_registered", {})
    registry.datasets.register("unnamed")(unnamed)
    words = ["--dataset", "topk/unnamed", *FOLDER, "--epochs", "1"]
    run = train(*words, tiny=())
    assert ("4 classes" in run.out) if kept else (run.status == 2 and "specify --num-classes" in run.err)
    assert train(*words, "--num-classes", "4", name="given", tiny=()).status == 0


@pytest.mark.parametrize("gone", ["train", "validation"])
def test_a_missing_split_is_an_error(train, folder, gone):
    (folder / gone).rename(folder.parent / "elsewhere")
    run = train(folder, *FOLDER, tiny=())
    assert run.status == 2
    assert gone in run.err


def test_a_class_that_has_one_image_leaves_none_to_evaluate(train, folder):
    for path in (folder / "train").glob("*/[1-9].png"):
        path.unlink()
    run = train(folder, *FOLDER, "-b", "2", "--val-split", "0.3", tiny=())
    assert run.status == 2
    assert "no images are left; see --val-split" in run.err


def test_classes_that_training_lacks(train, folder):
    (folder / "validation" / "red").rename(folder / "validation" / "violet")
    assert "violet" in train(folder, *FOLDER, tiny=()).err


def test_own_model_and_batches():
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 3))
    steps, rows = [], []
    config = TrainConfig(epochs=2, device="cpu", opt="sgd", warmup_epochs=0, output="", num_classes=3)
    trainer = Trainer(
        config, model=model, train_loader=batches, eval_loader=batches, quiet=True,
        on_step=lambda run, loss: steps.append(loss), on_epoch=lambda run, row: rows.append(row),
    )  # fmt: skip
    assert trainer.run.config.num_classes == 3
    assert evaluate(model, batches, num_classes=3, k=(1,))["top1"] >= 0
    with pytest.raises(TrainError, match="train_loader"):
        Trainer(eval_loader=batches)
