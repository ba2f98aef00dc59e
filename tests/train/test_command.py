"""Whole runs of ``timm train``: what they learn, print, refuse and leave behind."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import yaml

from topk_registry.cli.main import main


def test_a_run_learns_and_leaves_everything_behind(train):
    run = train("--loss", "smooth_topk_svm", "--loss-opt", "k=3", "--loss-opt", "tau=0.5", "--epochs", "8")
    assert run.status == 0
    assert [row["epoch"] for row in run.summary] == list(range(1, 9))
    first, last = run.summary[0], run.summary[-1]
    assert last["train_loss"] < 0.5 * first["train_loss"]
    assert last["eval_top1"] > 100 / 12 * 3
    assert last["eval_top5"] >= last["eval_top1"]
    assert math.isclose(last["eval_macro_top5"], last["eval_top5"])  # the classes are balanced
    files = {"last.pth.tar", "model_best.pth.tar", "args.yaml", "classes.txt", "summary.csv"}
    assert files <= {path.name for path in run.folder.iterdir()}
    assert not list(run.folder.glob("*.tmp"))
    for shown in ("smooth_topk_svm k=3 tau=0.5", "top-1", "macro top-5"):
        assert shown in run.out


def test_args_yaml_repeats_the_run(train):
    first = train("--loss", "topk_nll", "--loss-opt", "k=2", "--epochs", "1", name="first")
    assert yaml.safe_load((first.folder / "args.yaml").read_text())["loss_opt"] == {"k": 2}
    again = train("--config", first.folder / "args.yaml", name="again", tiny=())
    assert again.status == 0, again.err
    assert again.summary == first.summary


def test_without_data_the_built_in_job_runs(tmp_path, capsys):
    small = ["--dataset-opt", "size=320", "--epochs", "1", "--model-kwargs", "width=4"]
    assert main(["train", "--loss", "smooth_topk_svm", "--output", str(tmp_path), *small]) == 0
    assert "100 classes" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(train):
    run = train("--loss", "topk_nll", "--mixup", "0.2", "--dry-run")
    assert run.status == 0
    assert "dry run" in run.out
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "smooth_topk_svn"], "smooth_topk_svm"),  # did you mean
        (["--loss", "smooth_topk_svm", "--loss-opt", "k=0"], "k must be"),
        (["--loss", "smooth_topk_svm", "--loss-opt", "q=1"], "'q'|q="),
        (["--lr", "-1"], "--lr must be"),
        (["--model", "resnet5"], "resnet5"),
        (["--eval-metric", "best"], "--eval-metric must be one"),
        (["--mixup", "0.2", "-b", "15"], "even --batch-size"),
        (["--class-weight", "1,2"], "expected 12 non-negative numbers"),
        (["--val-split", "1.5"], "above 0 and below 1"),
        (["--learn-scale"], "--learn-scale needs --normalize-classifier"),
        (["--resume", "nowhere.pth.tar"], "no such checkpoint"),
        (["--dataset", "topk/nothing"], "nothing"),
        (["--opt", "adamx"], "adamx"),
    ],
)
def test_what_cannot_train_is_one_line_before_anything_is_written(train, flags, message):
    run = train(*flags)
    assert run.status in (1, 2)
    assert re.search(message, run.err), run.err
    assert "Traceback" not in run.err
    assert not run.folder.exists()


def test_a_run_is_not_overwritten_unasked(train):
    assert train("--epochs", "1").status == 0
    again = train("--epochs", "1")
    assert again.status != 0
    assert "--overwrite" in again.err
    assert train("--epochs", "1", "--overwrite").status == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--mixup", "0.4", "--cutmix", "1.0", "--smoothing", "0.1"],
        ["--mixup", "0.4", "--no-prefetcher", "--mixup-mode", "elem", "--mixup-off-epoch", "1"],
        ["--amp", "--loss", "smooth_topk_svm"],
        ["--model-dtype", "bfloat16"],
        ["--grad-accum-steps", "4", "--clip-grad", "1.0"],
        ["--clip-grad", "0.02", "--clip-mode", "agc"],
        ["--model-ema", "--model-ema-decay", "0.5", "--model-ema-warmup"],
        ["--channels-last", "--opt", "sgd", "--sched", "poly", "--lr-base", "0.01"],
        ["--reprob", "0.5", "--sched", "step", "--decay-epochs", "1", "--sched-on-updates"],
        ["--val-split", "0.25", "--eval-metric", "macro-top3"],
        ["--multi-crop", "5", "--loss", "topk_nll"],
        ["--normalize-classifier", "16", "--learn-scale", "--loss", "ldam"],
        ["--workers", "1", "--val-interval", "2", "--drop", "0.1", "--log-interval", "2"],
        ["--sampler", "class_balanced", "--class-weight", "inv_freq", "--checkpoint-hist", "1"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_flags_run(train, flags):
    run = train(*flags)
    assert run.status == 0, run.err
    assert all(math.isfinite(row["train_loss"]) for row in run.summary)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_augmentation_on_a_folder_of_images(train, image_folder):
    """timm's reader leaves the closing of image files to the garbage collector."""
    flags = ["--model", "topk_convnet", "--num-classes", "4", "-b", "8", "-j", "0", "--epochs", "12", "--opt", "adamw"]
    flags += ["--lr", "0.003", "--device", "cpu", "--aa", "rand-m5", "--reprob", "0.2", "--warmup-epochs", "0"]
    run = train("--data-dir", image_folder, *flags, "--loss", "smooth_topk_svm", "--loss-opt", "k=2", "tau=1", tiny=())
    assert run.status == 0, run.err
    assert max(row["eval_top1"] for row in run.summary) > 50  # brightness tells the classes apart
    assert (run.folder / "classes.txt").read_text().split() == [f"class{c}" for c in range(4)]


def test_early_stopping(train):
    run = train("--epochs", "20", "--lr", "1e-9", "--early-stop", "2", "--eval-metric", "macro-top5")
    assert run.status == 0
    assert len(run.summary) < 20


def test_a_learned_parameter_of_the_loss_is_trained_and_saved(train, register):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, logits, target):
            return F.cross_entropy(self.scale * logits, target)

    register("scaled", Scaled)
    run = train("--loss", "scaled", "--epochs", "1")
    saved = torch.load(run.folder / "last.pth.tar", weights_only=False)
    assert saved["task_state"]["criterion"][0]["scale"].item() != 2.0


def test_a_loss_gets_what_it_names_and_hears_of_epochs(train, register):
    heard = {}

    class Curious(torch.nn.Module):
        def __init__(self, num_classes, class_counts, smoothing, total_epochs):
            super().__init__()
            heard.update(n=num_classes, counts=class_counts, smoothing=smoothing, total=total_epochs)
            self.epochs = heard["epochs"] = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def forward(self, logits, target):
            return F.cross_entropy(logits, target)

    register("curious", Curious)
    assert train("--loss", "curious", "--smoothing", "0.2").status == 0
    assert (heard["n"], list(heard["counts"])) == (12, [8] * 12)
    assert (heard["smoothing"], heard["total"]) == (0.2, 2)
    assert heard["epochs"] == [0, 1]


def test_probabilities_of_the_loss_rank_the_classes(train, register):
    class Reversed(torch.nn.Module):
        def forward(self, logits, target):
            return F.cross_entropy(-logits, target)

        def probabilities(self, logits):
            return (-logits).softmax(-1)

    register("reversed", Reversed)
    run = train("--loss", "reversed", "--epochs", "8")
    assert run.summary[-1]["eval_top1"] > 100 / 12 * 3
    assert run.summary[-1]["eval_nll"] < math.log(12)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_name(train, register):
    register("broken", lambda: lambda logits, target: F.cross_entropy(logits, target) * float("nan"))
    run = train("--loss", "broken")
    assert run.status == 2
    assert "'broken'" in run.err
    assert "finite" in run.err


def test_a_loss_of_indices_refuses_mixtures_before_training(train, register):
    register("indices", lambda: lambda logits, target: -logits.log_softmax(1)[torch.arange(len(target)), target].mean())
    run = train("--loss", "indices", "--mixup", "0.3")
    assert run.status == 2
    assert "'indices'" in run.err
    assert not run.folder.exists()


def test_labels_are_smoothed_once(train):
    run = train("--loss", "topk_nll", "--loss-opt", "label_smoothing=0.2", "--smoothing", "0.1")
    assert run.status == 2
    assert "--smoothing" in run.err


def test_validate_repeats_the_last_evaluation(train, capsys):
    run = train("--loss", "topk_nll")
    main(["validate", str(run.folder / "last.pth.tar"), "--device", "cpu", "-j", "0"])
    printed = capsys.readouterr().out
    for label, name in (("top-1", "eval_top1"), ("top-5", "eval_top5"), ("macro top-5", "eval_macro_top5")):
        value = re.search(rf"^{label}\s+([\d.]+)", printed, re.MULTILINE)
        assert value, printed
        assert float(value[1]) == pytest.approx(run.summary[-1][name], abs=1e-2)


def test_validate_names_what_is_wrong_with_a_file(tmp_path, capsys):
    broken = tmp_path / "broken.pth.tar"
    broken.write_bytes(b"no checkpoint")
    for path in (broken, tmp_path / "missing.pth.tar"):
        assert main(["validate", str(path), "--device", "cpu"]) != 0
        printed = capsys.readouterr().err
        assert path.name in printed
        assert "Traceback" not in printed
