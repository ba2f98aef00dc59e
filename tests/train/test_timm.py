"""The same digits as timm's script: the same steps, by timm's public functions, in the script's order."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from timm import utils
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

FLAGS = ("--model", "resnet18", "--num-classes", "3", "--input-size", "3", "32", "32", "-b", "8", "-j", "0")
FLAGS += ("--epochs", "2", "--warmup-epochs", "1", "--lr", "0.02", "--opt", "sgd", "--device", "cpu", "--reprob", "0.4")
UNCLOSED = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def losses_of_timm(folder, mixup):
    """The mean training loss of two epochs, in the order of timm's train.py."""
    utils.random_seed(42, 0)
    model = create_model("resnet18", in_chans=3, num_classes=3)
    config = resolve_data_config({"input_size": (3, 32, 32)}, model=model)
    common = {"mean": config["mean"], "std": config["std"], "num_workers": 0, "device": torch.device("cpu")}
    collate = None
    if mixup:
        from timm.data import FastCollateMixup

        collate = FastCollateMixup(mixup_alpha=mixup, label_smoothing=0.1, num_classes=3)
    training = create_dataset("", root=str(folder), split="train", is_training=True, batch_size=8)
    loader = create_loader(
        training, input_size=(3, 32, 32), batch_size=8, is_training=True, re_prob=0.4, re_mode="pixel",
        scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), color_jitter=0.4, interpolation="random", collate_fn=collate, **common,
    )  # fmt: skip
    tests = create_loader(
        create_dataset("", root=str(folder), split="validation", batch_size=8), input_size=(3, 32, 32), batch_size=8,
        interpolation=config["interpolation"], crop_pct=config["crop_pct"], **common,
    )  # fmt: skip
    criterion = SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(0.1)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.02, weight_decay=2e-5, momentum=0.9)
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=2, warmup_epochs=1, warmup_lr=1e-5, updates_per_epoch=len(loader)
    )
    means = []
    for epoch in range(epochs):
        model.train()
        meter = utils.AverageMeter()
        optimizer.zero_grad()
        for update, (images, target) in enumerate(loader):
            loss = criterion(model(images), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.update(loss.item(), len(images))
            scheduler.step_update(num_updates=epoch * len(loader) + update + 1)
        model.eval()
        with torch.inference_mode():
            for images, _ in tests:
                model(images)
        scheduler.step(epoch + 1)
        means.append(meter.avg)
    return means, model.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings(*UNCLOSED)
@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_equal_digits(train, folder, mixup):
    means, weights = losses_of_timm(folder, mixup)
    run = train(folder, *FLAGS, "--mixup", mixup, tiny=())
    assert run.status == 0, run.err
    assert [float(row["train_loss"]) for row in run.summary] == means
    saved = run.checkpoint()["state_dict"]
    assert all(torch.equal(weights[name], saved[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.skipif("TIMM_TRAIN_SCRIPT" not in os.environ, reason="pip installs no train.py: set TIMM_TRAIN_SCRIPT")
@pytest.mark.filterwarnings(*UNCLOSED)
def test_equal_digits_with_the_script(train, folder, tmp_path):
    script = Path(os.environ["TIMM_TRAIN_SCRIPT"])
    words = [sys.executable, str(script), "--data-dir", str(folder), *FLAGS, "--output", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--experiment", "timm"], check=True, env=environment, capture_output=True)
    with open(tmp_path / "timm" / "summary.csv") as file:
        theirs = list(csv.DictReader(file))
    ours = train(folder, *FLAGS, tiny=()).summary
    for name in ("train_loss", "eval_top1"):
        assert [float(row[name]) for row in ours] == pytest.approx([float(row[name]) for row in theirs], abs=1e-12)
    assert [float(row["eval_nll"]) for row in ours] == pytest.approx([float(r["eval_loss"]) for r in theirs], rel=1e-6)
