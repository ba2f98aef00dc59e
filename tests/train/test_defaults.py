"""The defaults that differ from timm's script: each by name, and in one table."""

import json
import os
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import timm
import torch

from tests.train.conftest import TINY
from tests.train.test_train import FOLDER
from topk_registry.ops import backend
from topk_registry.train import TrainConfig, Trainer, TrainError
from topk_registry.train.config import parse_args, usual_workers
from topk_registry.train.loss import LossSpec
from topk_registry.train.plan import SPEEDUPS

ROOT = Path(__file__).parents[2]
# flags and defaults of timm's script; `TIMM_TRAIN_SCRIPT=PATH WRITE=1 pytest -m slow tests/train/test_defaults.py`
TIMMS = Path(__file__).with_name("timm_flags.json")


def defaults_of_timm():
    return json.loads(TIMMS.read_text())["defaults"]


def test_the_table_of_the_guide_has_every_default_that_differs():
    page = (ROOT / "docs" / "train.md").read_text()
    section = page.partition("## Differences to timm's script")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `--")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines]
    table = {name.removeprefix("--").replace("-", "_"): timm for name, timm, _ in rows}
    timm, here = defaults_of_timm(), TrainConfig(data_dir="images", loss="smooth_topk_svm").to_dict()
    unset = {"data_dir", "loss"}
    differ = {name for name in timm.keys() & here.keys() - unset if timm[name] != here[name]}
    assert {*table} - {"workers"} == differ - {"workers"}
    assert table == {name: str(timm[name]) for name in table}


@pytest.mark.slow
@pytest.mark.skipif("TIMM_TRAIN_SCRIPT" not in os.environ, reason="pip installs no train.py: set TIMM_TRAIN_SCRIPT")
def test_the_recorded_defaults_are_those_of_timms_parser(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    parser = runpy.run_path(os.environ["TIMM_TRAIN_SCRIPT"], run_name="script")["parser"]
    ours = {setting.name for setting in fields(TrainConfig)}
    defaults = {action.dest: action.default for action in parser._actions if action.dest in ours}
    if "WRITE" in os.environ:
        note = "TIMM_TRAIN_SCRIPT=PATH WRITE=1 python -m pytest -m slow tests/train/test_defaults.py"
        TIMMS.write_text(json.dumps({"written by": note, "defaults": defaults}, indent=1, sort_keys=True) + "\n")
    assert defaults == defaults_of_timm()


@pytest.mark.parametrize(
    ("loss", "options", "metric", "reason"),
    [
        ("smooth_topk_svm", {}, "top5", "k=5 of the loss"),
        ("smooth_topk_svm", {"k": 3}, "top3", "k=3 of the loss"),
        ("smooth_topk_svm", {"k": [1, 4]}, "top4", "k=4 of the loss"),
        ("noised_topk", {"k": 12}, "top1", "k=12 of the loss is not below 12"),
        ("ce", {}, "top1", "the loss has no k"),
        ("focal", {}, "top1", "the loss has no k"),
    ],
)
def test_the_metric_of_the_best_checkpoint(loss, options, metric, reason):
    assert LossSpec.resolve(loss, options).metric(12) == (metric, reason)


def test_a_run_selects_by_the_k_of_its_loss_and_the_plan_says_why(train):
    run = train("--loss", "smooth_topk_svm", "--loss-opt", "k=3", "--epochs", "1")
    assert "best      by top-3: k=3 of the loss" in run.out
    assert run.checkpoint()["args"].eval_metric == "top3"
    assert "best      by top-1: the loss has no k" in train("--dry-run", name="ce").out
    assert "best      by top-1: set by" in train("--loss", "smooth_topk_svm", "--eval-metric", "top1", "--dry-run").out


def test_the_trainer_selects_by_the_k_of_the_loss(tmp_path):
    batches = [(torch.randn(8, 4), torch.arange(8))] * 2
    config = TrainConfig(loss="smooth_topk_svm", loss_opt={"k": 2}, num_classes=8, device="cpu", output=str(tmp_path))
    trainer = Trainer(config, model=torch.nn.Linear(4, 8), train_loader=batches, eval_loader=batches, quiet=True)
    assert trainer.run.config.metric == "top2"
    assert trainer.run.config.smoothing == 0


def test_smoothing_is_for_cross_entropy():
    assert TrainConfig(data_dir="images").smoothing == 0.1
    assert TrainConfig(data_dir="images", loss="smooth_topk_svm").smoothing == 0
    assert TrainConfig(data_dir="images", loss="smooth_topk_svm", smoothing=0.1).smoothing == 0.1
    assert TrainConfig(data_dir="images", loss="ce").replace(loss="focal").smoothing == 0


def test_smoothing_of_a_file_belongs_to_its_loss(tmp_path):
    file = tmp_path / "args.yaml"
    file.write_text("data_dir: images\nloss: ce\nsmoothing: 0.1\n")
    assert parse_args(["--config", str(file), "--loss", "topk_nll"]).smoothing == 0
    file.write_text("data_dir: images\nloss: ce\nsmoothing: 0.2\n")
    assert parse_args(["--config", str(file), "--loss", "topk_nll"]).smoothing == 0.2


def test_the_plan_states_the_smoothing(train):
    assert TINY[-2:] == ("--smoothing", "0")
    run = train("--loss", "smooth_topk_svm", "--dry-run", tiny=TINY[:-2])
    assert "smoothing 0: timm's default of 0.1 applies to cross-entropy only" in run.out
    assert "smoothing 0\n" in train("--loss", "smooth_topk_svm", "--dry-run").out
    assert "smoothing 0.1\n" in train("--dry-run", tiny=TINY[:-2]).out


def test_the_plan_has_at_most_14_lines_and_states_what_decides_the_result(train, folder):
    flags = ("--opt", "sgd", "--epochs", "300", "--model-ema", "--amp", "--amp-dtype", "float16", "--mixup", "0.2")
    flags += ("--class-weight", "inv_freq", "--loss", "smooth_topk_svm", "--loss-opt", "k=2", "--seed", "7")
    weights = folder.parent / "weights.pth"
    torch.save(timm.create_model("topk_convnet", num_classes=3, width=4).state_dict(), weights)
    run = train(folder, *FOLDER, *flags, "--initial-checkpoint", weights, "--dry-run", tiny=())
    assert run.status == 0, run.err
    lines = run.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("loss "))
    end = next(i for i, line in enumerate(lines) if line.startswith("dry run "))
    assert end - start <= 14
    plan = "\n".join(lines[start:end])
    for fact in (
        *("32x32", "crop 1,", "bilinear", "random crop 0.08 to 1", "flip 0.5", "color jitter 0.4", "mixup 0.2"),
        *("smoothing 0: timm's", "best      by top-2 (EMA): k=2", "seed 7", "writes nothing", "--config finetune"),
        *("3 classes", "24 to train, 12 to evaluate", "class weights from 1 to 1", "few for --model-ema-decay"),
    ):
        assert fact in plan, plan
    assert not run.err
    several = train(folder, *FOLDER, "-b", "4", "--grad-accum-steps", "3", "--dry-run", tiny=())
    assert "batch 12," in several.out
    assert "--config finetune" not in train(folder, *FOLDER, "--opt", "sgd", "--dry-run", tiny=()).out


def test_the_plan_names_the_folder_that_the_run_writes(train, tmp_path):
    run = train("--epochs", "1", "--experiment", "")
    place = re.search(r"writes (.*)", run.out)[1]
    assert (tmp_path / place / "summary.csv").exists()


def test_a_missing_numba_is_a_line_of_the_plan_and_no_warning(train, monkeypatch):
    backend.forget_choices()
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    run = train("--loss", "smooth_topk_svm", "--dry-run")
    backend.forget_choices()
    assert run.status == 0, run.err  # a warning would be an error here
    assert "kernels   PyTorch; `pip install numba` makes the loss about 50 times faster\n" in run.out


def test_the_gain_of_numba_is_the_measured_one():
    rows = json.loads((ROOT / "docs/results/kernels.json").read_text())["rows"]
    measured = {row["loss"]: float(f"{1 / row['ratio']:.1g}") for row in rows if row["loss"] != "cross_entropy"}
    assert measured == SPEEDUPS


@pytest.mark.parametrize("name", ["finetune", "small"])
def test_recipes_are_settings_by_name(name):
    config = parse_args(["images", "--config", name, "--loss", "smooth_topk_svm", "--epochs", "3"])
    assert (config.opt, config.epochs, config.smoothing, config.data_dir) == ("adamw", 3, 0, "images")
    assert config.pretrained == (name == "finetune")
    assert parse_args(["--config", "finetune", "--initial-checkpoint", "x.pth"]).pretrained is False


def test_the_list_of_recipes(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--config", "list"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--config {name}\n" in printed for name in ("finetune", "small"))
    assert "epochs: 15" in printed


@pytest.mark.parametrize(
    "setting", [{"sampler": "class_balanced"}, {"dataset_opt": {"noise": 0.1}}, {"aa": "v0"}, {"reprob": 0.1},
                {"val_split": "0.1"}, {"multi_crop": 5}], ids=str
)  # fmt: skip
def test_own_loaders_refuse_settings_of_our_loaders(setting):
    batches = [(torch.randn(8, 4), torch.arange(8))]
    with pytest.raises(TrainError, match=f"{next(iter(setting))}.*without effect on your own batches"):
        Trainer(TrainConfig(num_classes=8, device="cpu", **setting), train_loader=batches)


def test_workers_are_at_most_the_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert usual_workers() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)}, raising=False)
    assert usual_workers() == 4


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_more_workers_than_cpus_are_no_warning(train, folder, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)  # PyTorch compares with this number
    run = train(folder, *FOLDER, "--epochs", "1", "-j", "2", "--no-aug", tiny=())
    assert run.status == 0, run.err  # a warning would be an error here
