"""Whole runs of ``timm train``: what they learn, print and leave behind."""

import math
import re
import time
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import yaml

from topk_registry.cli.main import main
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.engine import build
from topk_registry.train.report import console, curves
from topk_registry.train.setup.compute import Compute

from .conftest import TINY, unclosed_files


def test_a_run_learns_and_leaves_everything_behind(train):
    run = train("--loss", "smooth_topk_svm", "--loss-opt", "k=3", "--loss-opt", "tau=0.5", "--epochs", "8")
    assert run.status == 0
    assert [row["epoch"] for row in run.summary] == list(range(1, 9))
    first, last = run.summary[0], run.summary[-1]
    assert last["train_loss"] < 0.5 * first["train_loss"]
    assert last["eval_top1"] > 100 / 12 * 3
    assert last["eval_top5"] >= last["eval_top1"]
    assert math.isclose(last["eval_macro_top5"], last["eval_top5"])  # the classes are balanced
    files = {"last.pth.tar", "model_best.pth.tar", "args.yaml", "classes.txt", "curves.svg"}
    assert files <= {p.name for p in run.folder.iterdir()}
    assert not list(run.folder.glob("*.tmp"))
    for shown in ("smooth_topk_svm k=3 tau=0.5", "epoch 8/8", "top-1", "macro top-5", "best by top-1"):
        assert shown in run.out


def test_the_loss_is_recorded_as_plain_types(train):
    run = train("--loss", "smooth_topk_svm", "--loss-opt", "k=3", "tau=0.5", "--epochs", "1")
    record = {
        "name": "smooth_topk_svm",
        "options": {"k": 3, "tau": 0.5},
        "distribution": "topk-registry",
        "version": "0.1.0",
        "defaults": {"alpha": 1.0, "k_weights": None, "combine": "mean"},
    }
    assert yaml.safe_load((run.folder / "args.yaml").read_text())["loss_record"] == record
    checkpoint = run.checkpoint()
    assert checkpoint["task_state"]["loss"] == record
    assert checkpoint["args"].loss_record == record


def test_args_yaml_repeats_the_run(train):
    first = train("--loss", "topk_nll", "--loss-opt", "k=2", "--epochs", "1", name="first")
    again = train("--config", first.folder / "args.yaml", name="again", tiny=())
    assert again.status == 0
    assert again.summary == first.summary


def test_curves_are_a_picture(train, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(console, "draw", curves.draw)
    run = train("--epochs", "2")
    svg = ElementTree.parse(run.folder / "curves.svg").getroot()
    names = {"train loss", "NLL", "top-1", "top-5", "macro top-5"}
    lines = {group.get("id"): group for group in svg.iter() if group.get("id") in names}
    assert set(lines) == names
    for line in lines.values():
        assert len(line[0].get("d").split("L")) == 2  # from the first epoch to the second


def test_a_number_has_one_name_wherever_a_person_reads_it(train, capsys, monkeypatch):
    """Of the console, the table, the csv file, the curves and validate; epochs count from 1 in all, and in files."""
    pictures = []
    monkeypatch.setattr(console, "draw", lambda title, panels: pictures.append(panels) or "<svg/>")
    run = train("--epochs", "2")
    columns = [name for name in run.summary[0] if name not in ("epoch", "lr")]
    labels = {console.label(name): name for name in columns}
    table = run.out.partition("last        best")[2]
    curves = {name: line for panel in pictures[-1] for name, line in panel.lines.items()}
    assert set(curves) <= set(labels)
    main(["validate", "--checkpoint", str(run.folder / "last.pth.tar"), "--device", "cpu", "-j", "0"])
    validated = capsys.readouterr().out
    for label, name in labels.items():
        assert re.search(rf"^{label} +\d", table, re.MULTILINE), label
        if name.startswith("eval_"):
            value = re.search(rf"^{label} +([\d.]+)$", validated, re.MULTILINE)
            assert float(value[1]) == pytest.approx(run.summary[-1][name], abs=1e-4)
    for label in curves:
        assert f"  {label} " in next(line for line in run.out.splitlines() if line.startswith("epoch 1/2"))
        assert curves[label] == [(row["epoch"], row[labels[label]]) for row in run.summary]
    assert [row["epoch"] for row in run.summary] == [1, 2]
    assert {path.name for path in run.folder.glob("checkpoint-*")} == {"checkpoint-1.pth.tar", "checkpoint-2.pth.tar"}


def test_the_total_time_counts_from_the_command_on(train, monkeypatch):
    """Reading the data takes 1000 seconds here."""
    real, waited = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + waited[0])
    opened = build.open_data

    def slowly(*args, **kwargs):
        waited[0] += 1000.0
        return opened(*args, **kwargs)

    monkeypatch.setattr(build, "open_data", slowly)
    run = train("--epochs", "1")
    assert 1000 <= float(re.search(r"; (\d+) s in all", run.out)[1]) < 2000


def test_without_matplotlib_there_are_no_curves_and_it_is_said_once(train, monkeypatch):
    monkeypatch.setattr(console, "can_draw", lambda: False)
    monkeypatch.setattr(console, "BETWEEN_PICTURES", 0.0)
    run = train("--epochs", "3")
    assert run.status == 0
    assert run.out.count("pip install 'topk-registry[curves]'") == 1
    assert not (run.folder / "curves.svg").exists()


def test_without_data_the_built_in_job_runs(tmp_path, capsys):
    small = ["--dataset-opt", "size=320", "--epochs", "1", "--model-kwargs", "width=4"]
    assert main(["train", "--loss", "smooth_topk_svm", "--output", str(tmp_path), *small]) == 0
    assert "100 classes" in capsys.readouterr().out


def test_every_entrance_is_the_same_command(monkeypatch, capsys):
    from topk_registry.cli import main as cli

    monkeypatch.setattr("sys.argv", ["topk-train", "--loss", "no_such_loss"])
    assert cli.train() == 1
    assert "no loss is called 'no_such_loss'" in capsys.readouterr().err


def test_dry_run_writes_nothing(train):
    run = train("--loss", "topk_nll", "--mixup", "0.2", "--dry-run")
    assert run.status == 0
    assert "mixed labels [16, 2]" in run.out
    assert not run.folder.exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--mixup", "0.4", "--cutmix", "1.0", "--smoothing", "0.1"],
        ["--mixup", "0.4", "--no-prefetcher"],
        ["--cutmix-minmax", "0.2", "0.8", "--mixup-mode", "elem", "--mixup-off-epoch", "1"],
        ["--bce-loss", "--bce-target-thresh", "0.2"],
        ["--amp", "--amp-dtype", "bfloat16"],
        ["--amp", "--loss", "smooth_topk_svm"],
        ["--model-dtype", "bfloat16"],
        ["--grad-accum-steps", "4", "--clip-grad", "1.0"],
        ["--clip-grad", "0.02", "--clip-mode", "agc"],
        ["--model-ema", "--model-ema-decay", "0.5", "--model-ema-warmup"],
        ["--channels-last", "--opt", "sgd", "--sched", "poly", "--lr-base", "0.01"],
        ["--reprob", "0.5", "--sched", "step", "--decay-epochs", "1", "--sched-on-updates"],
        ["--torchcompile", "eager", "--model-ema"],
        ["--label-noise", "0.5", "--long-tail", "exp", "--imbalance-factor", "4", "--subset", "0.75"],
        ["--val-split", "0.25", "--long-tail", "pareto", "--eval-metric", "few-top3"],
        ["--val-split", "", "--recovery-interval", "2"],
        ["--multi-crop", "5", "--eval-metric", "macro-top3", "--loss", "topk_nll"],
        ["--normalize-classifier", "16", "--learn-scale", "--loss", "ldam", "--long-tail", "exp"],
        ["--workers", "1", "--val-interval", "2", "--drop", "0.1", "--save-images", "--log-interval", "2"],
        ["--head-init-scale", "0.1", "--head-init-bias", "-1", "--pin-mem", "--fast-norm", "--checkpoint-hist", "1"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_flags_run(train, flags):
    run = train(*flags)
    assert run.status == 0, run.err
    assert all(math.isfinite(row["train_loss"]) for row in run.summary)


@unclosed_files
def test_real_augmentation_on_an_image_folder(train, image_folder):
    flags = ["--model", "topk_convnet", "--num-classes", "4", "-b", "8", "-j", "0", "--epochs", "6", "--opt", "adamw"]
    flags += ["--lr", "0.003", "--device", "cpu", "--aa", "rand-m5", "--reprob", "0.2", "--warmup-epochs", "0"]
    run = train("--data-dir", image_folder, *flags, "--loss", "smooth_topk_svm", "--loss-opt", "k=2", "tau=1", tiny=())
    assert run.status == 0, run.err
    assert max(row["eval_top1"] for row in run.summary) > 50  # brightness tells the classes apart


def test_label_smoothing_is_said_whether_it_takes_effect(train, register):
    register("plain", lambda: torch.nn.functional.cross_entropy)
    assert "label smoothing 0.1\n" in train("--loss", "topk_nll", "--smoothing", "0.1", "--dry-run").out
    assert (
        "label smoothing 0.1 has no effect: 'plain'" in train("--loss", "plain", "--smoothing", "0.1", "--dry-run").out
    )
    assert "label smoothing" not in train("--loss", "topk_nll", "--dry-run").out
    mixed = train("--loss", "topk_nll", "--smoothing", "0.1", "--mixup", "0.3", "--dry-run").out
    assert "label smoothing 0.1, in the mixed targets\n" in mixed
    own = ("--loss", "topk_nll", "--loss-opt", "label_smoothing=0.2")
    assert "label smoothing 0.2, by the loss's option\n" in train(*own, "--dry-run").out


@pytest.mark.parametrize(
    ("loss", "option"), [("topk_nll", "label_smoothing=0.2"), ("ce", "smoothing=0.2"), ("focal", "label_smoothing=0.0")]
)
@pytest.mark.parametrize("mixing", [[], ["--mixup", "0.3"]], ids=["indices", "mixed"])
def test_labels_are_smoothed_once(train, loss, option, mixing):
    run = train("--loss", loss, "--loss-opt", option, "--smoothing", "0.1", *mixing)
    assert run.status == 2
    assert f"--smoothing 0.1 and --loss-opt {option} both say how labels are smoothed" in run.err
    assert train("--loss", loss, "--loss-opt", option, *mixing, "--dry-run").status == 0


def test_without_a_terminal_steps_are_lines(train):
    run = train("--log-interval", "2", "--epochs", "2")
    lines = [line for line in run.out.splitlines() if "img/s" in line]
    assert [line[:15].split() for line in lines] == [["epoch", f"{e}/2", f"{s}/6"] for e in (1, 2) for s in (2, 4)]
    assert all(re.search(r"running loss \d+\.\d+  lr \S+  \d+ img/s  \d+:\d\d:\d\d left$", line) for line in lines)
    assert "img/s" not in train("--log-interval", "50").out


def test_an_epoch_has_as_many_batches_as_asked_for(train):
    for batches in (2, 15):  # fewer than there are, and two passes and a half over the data
        run = train("--train-steps-per-epoch", batches, "--epochs", "1", "--log-interval", "1", name=f"of{batches}")
        assert f"epochs of {batches} updates" in run.out
        assert run.checkpoint()["task_state"]["progress"]["steps_per_epoch"] == batches


def test_the_precision_of_amp_on_a_cpu(train):
    assert "slow on a CPU" in train("--amp", "--amp-dtype", "float16", "--dry-run").out
    assert Compute.set_up(parse_args([*TINY, "--amp"])).amp == "bfloat16"
    assert "slow on a CPU" not in train("--amp", "--dry-run").out


def test_early_stopping(train):
    run = train("--epochs", "20", "--lr", "1e-9", "--early-stop", "2", "--eval-metric", "macro-top5")
    assert run.status == 0
    assert len(run.summary) < 20
    assert "stopped early" in run.out


def test_augmentation_does_not_depend_on_the_number_of_workers(train):
    flags = ["--mixup", "0.4", "--reprob", "0.5", "--epochs", "1"]
    augmented = tuple(flag for flag in TINY if flag != "--no-aug")
    alone, shared = (train(*flags, "-j", j, name=f"j{j}", tiny=augmented) for j in (0, 2))
    assert alone.summary == shared.summary


def test_a_learned_parameter_of_the_loss_is_trained_and_saved(train, register):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, logits, target):
            return torch.nn.functional.cross_entropy(self.scale * logits, target)

    register("scaled", Scaled)
    run = train("--loss", "scaled", "--epochs", "1")
    assert run.checkpoint()["task_state"]["criterion"]["scale"].item() != 2.0


def test_a_loss_gets_what_it_names_and_hears_of_epochs(train, register):
    heard = {}

    class Curious(torch.nn.Module):
        def __init__(self, num_classes, class_counts, smoothing, soft_targets, total_epochs):
            super().__init__()
            heard.update(locals())
            self.epochs = heard.setdefault("epochs", [])

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def forward(self, logits, target):
            return torch.nn.functional.cross_entropy(logits, target)

    register("curious", Curious)
    train("--loss", "curious", "--smoothing", "0.2", "--dataset-opt", "size=96", "superclasses=3", "fine=2")
    assert (heard["num_classes"], heard["class_counts"]) == (6, [16] * 6)
    assert (heard["smoothing"], heard["soft_targets"], heard["total_epochs"]) == (0.2, False, 2)
    assert heard["epochs"] == [0, 1]
    train("--loss", "curious", "--smoothing", "0.2", "--mixup", "0.3", name="mixed")
    assert (heard["smoothing"], heard["soft_targets"]) == (0.0, True)


def test_probabilities_of_the_loss_rank_the_classes(train, register):
    class Reversed(torch.nn.Module):
        def forward(self, logits, target):
            return torch.nn.functional.cross_entropy(-logits, target)

        def probabilities(self, logits):
            return (-logits).softmax(-1)

    register("reversed", Reversed)
    run = train("--loss", "reversed", "--epochs", "8")
    assert run.summary[-1]["eval_top1"] > 100 / 12 * 3
    assert run.summary[-1]["eval_nll"] < math.log(12)
