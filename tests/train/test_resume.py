"""Resume bit for bit from the last completed epoch, and signals in the middle of everything."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from topk_registry.train import TrainConfig, TrainError, checkpoint
from topk_registry.train.checkpoint import LAST, Saver
from topk_registry.train.run import StopRequest

FOUR = ("--epochs", "4", "--loss", "noised_topk", "--drop", "0.2", "--reprob", "0.3")


def same_run(one, other):
    """Whether two checkpoints have the same weights, optimizer states and generators."""
    assert {*one["state_dict"]} == {*other["state_dict"]}
    for name in one["state_dict"]:
        assert torch.equal(one["state_dict"][name], other["state_dict"][name]), name
    for a, b in zip(*(saved["task_state"]["generators"] for saved in (one, other)), strict=True):  # of each process
        assert a["python"] == b["python"]
        assert torch.equal(a["torch"], b["torch"])
        assert torch.equal(a["numpy"][1], b["numpy"][1])
    assert one["task_state"]["progress"] == other["task_state"]["progress"]


class Stops:
    """Ask a run to stop when it asks the ``at``-th time."""

    def __init__(self, monkeypatch, at):
        asked = []
        monkeypatch.setattr(StopRequest, "__bool__", lambda stop: asked.append(1) or len(asked) >= at)


@pytest.mark.parametrize("flags", [(), ("--mixup", "0.4"), ("--model-ema",), ("--sampler", "class_balanced")], ids=str)
@pytest.mark.parametrize("at", [22, 40])
def test_resume_auto_gives_the_weights_of_an_uninterrupted_run(train, monkeypatch, flags, at):
    whole = train(*FOUR, *flags, name="whole")
    with monkeypatch.context() as patched:
        Stops(patched, at)
        stopped = train(*FOUR, *flags, name="parts")
    assert stopped.status > 128
    assert "--resume auto" in stopped.err
    resumed = train(*FOUR, *flags, "--resume", "auto", name="parts")
    assert resumed.status == 0, resumed.err
    assert "resumed" in resumed.out
    same_run(whole.checkpoint(), resumed.checkpoint())
    keys = [key for key in whole.summary[0] if key != "seconds"]
    assert [[row[key] for key in keys] for row in whole.summary] == [[r[key] for key in keys] for r in resumed.summary]


def test_stopped_in_the_first_epoch_it_starts_again(train, monkeypatch):
    whole = train(*FOUR, name="whole")
    with monkeypatch.context() as patched:
        Stops(patched, 2)
        assert "no epoch is complete" in train(*FOUR, name="parts").err
    same_run(whole.checkpoint(), train(*FOUR, "--resume", "auto", name="parts").checkpoint())


def test_resume_auto_without_a_checkpoint_starts_a_new_run(train):
    run = train("--val-split", "0.25", "--resume", "auto", "--dry-run")  # the data have a message too
    assert ("held out" in run.out, "no checkpoint of this run" in run.out) == (True, True), run.out + run.err


def test_resume_auto_refuses_other_settings(train):
    train("--epochs", "1")
    run = train("--epochs", "2", "--lr", "0.5", "--resume", "auto")
    assert run.status == 2
    assert "lr: 0.01 -> 0.5" in run.err


@pytest.mark.parametrize(
    ("flags", "words"), [(("--model-kwargs", "width=8"), "topk_convnet"), (("--opt", "sgd"), "optimizer 'adamw'")]
)
def test_resume_of_another_model_or_optimizer(train, tmp_path, flags, words):
    train("--epochs", "1")
    run = train(*flags, "--resume", tmp_path / "run" / LAST, name="other")
    assert run.status == 2
    assert words in run.err


def test_resume_of_timms_checkpoint_says_what_it_restored(train, tmp_path):
    saved = train("--epochs", "1").checkpoint()
    del saved["task_state"]
    torch.save(saved, tmp_path / "timms.pth.tar")
    run = train("--resume", tmp_path / "timms.pth.tar", "--opt", "sgd", name="other")
    assert (run.status, "it has optimizer 'adamw', not --opt sgd" in run.err) == (2, True), run.err
    run = train("--resume", tmp_path / "timms.pth.tar", name="other")
    assert run.status == 0, run.err
    assert "not the random state" in run.out
    assert len(run.summary) == 1


@pytest.mark.parametrize(
    ("name", "flags"), [("other", ()), ("run", ("--model-ema",)), ("run", ("--eval-metric", "macro-top5"))]
)
def test_the_best_epoch_is_best_by_this_metric_in_this_folder(train, name, flags):
    first = train("--epochs", "1")
    saved = first.checkpoint()
    saved["task_state"]["progress"]["best"] = saved["metric"] = 101.0
    torch.save(saved, changed := first.folder / "changed.pth.tar")
    run = train("--epochs", "2", *flags, "--resume", changed, name=name)
    assert run.checkpoint()["task_state"]["progress"]["best_epoch"] == 1, run.err
    assert run.checkpoint("model_best.pth.tar")["epoch"] == 1
    assert "nan" not in run.out


def test_half_a_file_is_never_a_checkpoint(train, tmp_path, monkeypatch):
    first = train("--epochs", "1")
    before = (first.folder / LAST).read_bytes()

    def half(state, path):
        Path(path).write_bytes(before[: len(before) // 2])
        raise RuntimeError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("timm.utils.checkpoint_saver.torch.save", half)
        run = train("--epochs", "2", "--resume", "auto")
    assert run.status == 1
    assert "MiB free" in run.err
    assert (first.folder / LAST).read_bytes() == before


def test_killed_between_the_steps_of_a_checkpoint(tmp_path, monkeypatch):
    """After each call that changes the folder, every checkpoint in it can be read."""
    model = torch.nn.Linear(2, 2)
    saver = Saver(model=model, optimizer=torch.optim.SGD(model.parameters()), checkpoint_dir=str(tmp_path))
    seen = []

    def check(call):
        def checked(*args, **kwargs):
            result = call(*args, **kwargs)
            paths = [path for path in tmp_path.glob("*.pth.tar") if not path.name.startswith("tmp")]
            for path in paths:
                torch.load(path, weights_only=True)
            seen.append({path.name for path in paths})
            return result

        return checked

    for name in ("replace", "link", "unlink", "remove"):
        monkeypatch.setattr(checkpoint.os, name, check(getattr(os, name)))
    for epoch in range(3):
        saver.save(epoch, float(epoch))
    assert len(seen) > 6
    assert all({LAST, "model_best.pth.tar"} <= names for names in seen[4:])


def test_settings_of_the_continued_run_are_named_right():
    assert all(hasattr(TrainConfig(), name) for name in checkpoint.FREE)
    with pytest.raises(TrainError, match="folder"):
        checkpoint.resume_path(TrainConfig(resume="."))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
@pytest.mark.parametrize("moment", ["[3/", "saving"])
def test_signals_in_another_process(start, train, tmp_path, signum, moment):
    flags = ("--epochs", "6", "--log-interval", "1", "--loss", "focal")
    whole = train(*flags, name="whole")
    process = start(*flags, name="parts")
    folder = tmp_path / "parts"
    for line in process.stdout:
        if line.startswith("Epoch 2"):
            break
    if moment == "saving":
        deadline = time.monotonic() + 30
        while not (folder / "tmp.pth.tar").exists() and time.monotonic() < deadline and process.poll() is None:
            pass
    process.send_signal(signum)
    out = process.communicate(timeout=60)[0]
    assert process.returncode in (-signum, 128 + signum, 0), out
    if signum != signal.SIGKILL and process.returncode:
        assert "--resume auto" in out
    same_run(whole.checkpoint(), train(*flags, "--resume", "auto", name="parts").checkpoint())


@pytest.mark.slow
@pytest.mark.nightly  # 12 processes that import torch
def test_two_processes_stop_at_signals_and_resume_alike(start, tmp_path):
    """SIGTERM to torchrun, and Ctrl-C to the whole group, as a terminal sends it: the weights of an unbroken run."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    flags = ("--loss", "focal", "--class-weight", "inv_freq", "--model-kwargs", "width=4", "norm=True")
    flags += ("--epochs", "3", "--log-interval", "1")

    def run(*argv, name, until="", stop=None):
        """What was printed; ``stop`` is called at the first line that begins so."""
        process = start(*flags, *argv, launcher=launcher, name=name)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if until and line.startswith(until):
                stop(process.pid)
                until = ""
        process.wait(timeout=60)
        return process.returncode, "".join(lines)

    status, out = run(name="whole")
    assert status == 0, out
    assert out.count("2 processes") == 1
    for until, stop, argv in (
        ("Train: 2/3 [1/3]", lambda pid: os.kill(pid, signal.SIGTERM), ()),
        ("Train: 3/3 [1/3]", lambda pid: os.killpg(pid, signal.SIGINT), ("--resume", "auto")),
    ):
        status, out = run(*argv, name="parts", until=until, stop=stop)
        assert status != 0, out
        assert out.count("is saved; continue with") == 1, out
        assert "torchrun --nproc-per-node=2 -m topk_registry train" in out
    status, out = run("--resume", "auto", name="parts")
    assert status == 0, out
    assert "after epoch 2" in out
    paths = [tmp_path / name / LAST for name in ("whole", "parts")]
    one, other = map(checkpoint.read_checkpoint, paths)
    assert len(one["task_state"]["generators"]) == 2
    same_run(one, other)


SETTINGS = [("--aa", "rand-m9-mstd0.5-inc1"), ("--sampler", "class_balanced"), ("--class-weight", "inv_freq")]


@pytest.mark.parametrize("flags", SETTINGS, ids=lambda flags: flags[0])
def test_resume_auto_compares_settings_that_are_not_set(train, tmp_path, flags):
    train("--epochs", "1", *flags)
    run = train("--epochs", "1", "--resume", "auto")
    assert run.status == 2
    assert f"{flags[0][2:].replace('-', '_')}: " in run.err
    assert train("--epochs", "1", *flags, "--resume", "auto").status == 0


def test_two_runs_do_not_share_a_folder(train, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with checkpoint.occupied(folder):
        run = train("--epochs", "1")
    assert run.status == 1
    assert "another run trains in" in run.err
    assert not list(folder.iterdir())
    assert train("--epochs", "1").status == 0


@pytest.mark.parametrize("flags", [(), ("--sched-on-updates",)], ids=str)
def test_a_signal_during_evaluation_keeps_the_trained_epoch(train, monkeypatch, flags):
    from topk_registry.train import loop

    flags = ("--epochs", "3", "--loss", "noised_topk", *flags)
    whole = train(*flags, name="whole")
    measured = []

    def stopped(run, loss):
        measured.append(loss)
        if len(measured) < 2:
            return original(run, loss)
        run.stop.signum = 15
        return None

    original = loop.measure
    with monkeypatch.context() as patched:
        patched.setattr(loop, "measure", stopped)
        run = train(*flags, name="parts")
    assert "epoch 2 is trained and saved" in run.err
    steps = []
    train_epoch = loop.train_epoch
    monkeypatch.setattr(loop, "train_epoch", lambda run, epoch: steps.append(epoch) or train_epoch(run, epoch))
    resumed = train(*flags, "--resume", "auto", name="parts")
    assert resumed.status == 0, resumed.err
    assert steps == [2]
    same_run(whole.checkpoint(), resumed.checkpoint())
    for key in ("eval_top1", "lr"):
        assert [row[key] for row in whole.summary] == [row[key] for row in resumed.summary]


def test_a_run_that_stopped_early_stays_stopped(train):
    flags = ("--epochs", "5", "--lr", "0", "--early-stop", "1")
    stopped = train(*flags).checkpoint()
    resumed = train(*flags, "--resume", "auto")
    assert (resumed.status, "stopped early" in resumed.out) == (0, True), resumed.out + resumed.err
    same_run(stopped, resumed.checkpoint())
    assert len(resumed.summary) == 2


def test_settings_of_timms_script_name_its_registered_loss():
    from topk_registry.train.config import clean_settings

    record = {
        "name": "focal",
        "options": {"gamma": 3.0},
        "distribution": "topk-registry",
        "version": "0",
        "defaults": {},
    }
    script = {"model": "resnet18", "prefetcher": True, "local_rank": 0, "grad_accum_steps": 1, "loss_record": record}
    cleaned = clean_settings(script, strict=False)
    assert (cleaned["loss"], cleaned["loss_opt"]) == ("focal", {"gamma": 3.0})
    assert "prefetcher" not in cleaned
    with pytest.raises(TrainError, match="prefetcher"):
        clean_settings(script)


def test_resume_of_a_script_with_another_loss_names_the_loss(train, tmp_path):
    saved = train("--epochs", "1").checkpoint()
    del saved["task_state"]
    saved["args"].loss_record = {"name": "focal", "options": {"gamma": 3.0}}
    torch.save(saved, tmp_path / "script.pth.tar")
    run = train("--resume", tmp_path / "script.pth.tar", name="other")
    assert "the checkpoint has another loss or other options: 'focal' gamma=3.0" in run.out
