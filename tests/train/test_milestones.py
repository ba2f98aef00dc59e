"""Runs that stop early and keep checkpoints on the way, without another schedule; and schedules with such an end."""

import math

import pytest
import torch
import yaml
from timm.scheduler import create_scheduler_v2

from topk_registry.train import TrainConfig
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.errors import ConfigError
from topk_registry.train.setup.models import build_model

from .ranked import assert_same

STATE = ("state_dict", "optimizer", "task_state", "epoch")


def same(one, other, *names):
    """The checkpoints of two runs hold the same state, bit for bit."""
    files = names * 2 if len(names) == 1 else names
    a, b = (run.checkpoint(f"{name}.pth.tar") for run, name in zip((one, other), files, strict=True))
    assert_same({key: a[key] for key in STATE}, {key: b[key] for key in STATE})


def test_a_run_stops_keeps_milestones_and_goes_on(train):
    flags = ("--epochs", "4", "--save-epochs", "1", "2", "--val-interval", "4")
    whole = train(*flags, name="whole")
    stopped = train(*flags, "--stop-epoch", "3", name="parts")
    assert stopped.status == 0, stopped.err
    assert [math.isnan(row["eval_top1"]) for row in stopped.summary] == [False, False, False]
    assert [math.isnan(row["eval_top1"]) for row in whole.summary] == [False, False, True, False]
    assert [row["lr"] for row in stopped.summary] == [row["lr"] for row in whole.summary[:3]]
    assert "stopped after epoch 3, as --stop-epoch says" in stopped.out
    assert f"--resume {stopped.folder}/last.pth.tar --stop-epoch 4" in stopped.out
    args = yaml.safe_load((stopped.folder / "args.yaml").read_text())
    assert (args["epochs"], args["stop_epoch"], args["save_epochs"]) == (4, 3, [1, 2])
    for epoch in (1, 2):
        assert stopped.checkpoint(f"milestone-{epoch}.pth.tar")["epoch"] == epoch - 1  # timm counts from 0
        same(whole, stopped, f"milestone-{epoch}")
    resumed = train(*flags, "--resume", "auto", name="parts")
    assert resumed.status == 0, resumed.err
    assert_same(whole.checkpoint()["state_dict"], resumed.checkpoint()["state_dict"])
    again = train(*flags, "--resume", "auto", "--stop-epoch", "2", name="parts")
    assert again.status == 0, again.err
    assert len(again.summary) == 4


def test_a_run_goes_on_from_a_milestone(train):
    flags = ("--epochs", "3", "--save-epochs", "2", "--checkpoint-hist", "1")
    whole = train(*flags, name="whole")
    other = train(*flags, "--resume", whole.folder / "milestone-2.pth.tar", name="other")
    assert other.status == 0, other.err
    same(whole, other, "last")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stop-epoch", "3"], "--stop-epoch 3: expected 1 to 2, the number of epochs of the run"),
        (["--stop-epoch", "0"], "--stop-epoch 0: expected 1 to 2"),
        (["--save-epochs", "1", "5"], "--save-epochs 5: expected 1 to 2"),
        (["--sched", "wsd", "--decay-epochs", "3"], "wsd schedule requires 0 < decay_epochs <= epochs"),
        (["--sched", "wsd", "--lr-decay-fn", "slow"], "cannot create schedule 'wsd'"),
    ],
)
def test_epochs_that_there_are_not_are_refused(train, flags, message):
    run = train(*flags)
    assert run.status == 2
    assert message in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--sched", "wsd"], {"sched": "wsd"}),
        (
            ["--sched", "wsd", "--decay-epochs", "2", "--lr-decay-fn", "cosine"],
            {"sched": "wsd", "decay_epochs": 2, "decay_fn": "cosine"},
        ),
        (
            ["--sched", "rsqrt", "--decay-epochs", "0.5", "--lr-stable-timescale", "2"],
            {"sched": "rsqrt", "decay_epochs": 0.5, "stable_timescale": 2},
        ),
        (["--sched", "constant"], {"sched": "constant"}),
        (["--sched", "step"], {"sched": "step"}),
    ],
)
def test_schedules_with_an_end_of_their_own_are_timms(train, flags, settings):
    run = train(*flags, "--epochs", "5", "--min-lr", "1e-4")
    assert run.status == 0, run.err
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    schedule, _ = create_scheduler_v2(optimizer, num_epochs=5, min_lr=1e-4, **settings)
    rates = []
    for epoch in range(5):
        schedule.step(epoch)
        rates.append(optimizer.param_groups[0]["lr"])
    assert [row["lr"] for row in run.summary] == pytest.approx(rates)


def test_flags_of_timms_losses_are_their_options(tmp_path, capsys):
    args = parse_args(["--loss", "asl", "--asl-gamma-neg", "2", "--asl-gamma-pos", "1", "--loss-opt", "asl_clip=0.1"])
    assert args.loss_opt == {"asl_gamma_neg": 2.0, "asl_clip": 0.1}
    with pytest.raises(ConfigError, match="--poly-epsilon is for --loss poly, and the loss is asl"):
        TrainConfig.from_dict({"loss": "asl", "poly_epsilon": 1.0})
    saved = {"loss": "poly", "poly_epsilon": 1.0, "asl_clip": 0.05, "persistent_workers": False}  # as timm saves them
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(saved))
    read = parse_args(["--config", str(tmp_path / "args.yaml")])
    assert (read.loss, read.loss_opt, read.no_persistent_workers) == ("poly", {"poly_epsilon": 1.0}, True)
    other = parse_args(["--config", str(tmp_path / "args.yaml"), "--loss", "focal"])
    assert (other.loss, other.loss_opt) == ("focal", {})
    assert "poly_epsilon=1.0" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--img-size", "32"], ["--input-size", "3", "32", "32"]])
def test_a_network_for_one_size_of_images_is_built_for_the_one_that_is_asked_for(flags):
    config = parse_args(["x", "--model", "deit_tiny_patch16_224", *flags])
    assert build_model(config, 7)(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_entries_of_the_pretrained_configuration_are_replaced():
    config = parse_args(["x", "--model", "resnet18", "--pretrained-cfg-overlay", "crop_pct=0.5"])
    assert build_model(config, 7).pretrained_cfg["crop_pct"] == 0.5
