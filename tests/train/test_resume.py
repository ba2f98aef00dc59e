"""Interrupts lose nothing: a run that was stopped and went on ends as the run that was never stopped, bit for bit."""

import shutil
import signal
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml

from tests.train.ranked import assert_same
from topk_registry import registry
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.train import TrainConfig
from topk_registry.train.engine import begin, resume, signals
from topk_registry.train.engine.signals import StopRequest
from topk_registry.train.errors import ConfigError

from .conftest import TINY

EVERYTHING = (
    *(flag for flag in TINY if flag != "--no-aug"),
    *(
        "--mixup",
        "0.3",
        "--reprob",
        "0.5",
        "--drop",
        "0.2",
        "--model-ema",
        "--model-ema-decay",
        "0.9",
        "--aa",
        "rand-m5",
    ),
    *("--sched-on-updates", "--grad-accum-steps", "2", "--epochs", "3", "--lr-noise", "0", "1", "--loss", "eventful"),
)


class Eventful(torch.nn.Module):
    """A loss with a state, that draws random numbers, and raises a signal at a chosen call."""

    at = -1
    calls = 0
    signum = signal.SIGTERM

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def forward(self, logits, target):
        if torch.is_grad_enabled() and logits.requires_grad and len(logits) == 16:  # not the trial before training
            Eventful.calls += 1
            if Eventful.calls == Eventful.at:
                signal.raise_signal(Eventful.signum)
        self.seen += 1
        noise = torch.randn_like(logits) * (0.1 + 0.01 * self.epoch) / (1 + self.seen)
        return torch.nn.functional.cross_entropy(logits + noise, target)


@pytest.fixture
def interrupted(train, register):
    """Run, raising a signal at one call of the loss."""
    register("eventful", Eventful)

    def run(at, *flags, name, signum=signal.SIGTERM):
        Eventful.at, Eventful.calls, Eventful.signum = at, 0, signum
        return train(*flags, name=name, tiny=EVERYTHING)

    return run


STATE = ("state_dict", "state_dict_ema", "optimizer", "task_state", "epoch", "metric")


@pytest.mark.slow
@pytest.mark.parametrize(("at", "workers"), [(4, 0), (6, 0), (9, 1), (18, 0)])  # 6: end of an epoch, 18: of the run
def test_a_resumed_run_is_the_uninterrupted_one(interrupted, at, workers):
    whole = interrupted(-1, "-j", workers, name="whole")
    assert whole.status == 0
    stopped = interrupted(at, "-j", workers, name="stopped")
    assert stopped.status == 128 + signal.SIGTERM
    assert "--resume" in stopped.err
    # the first half runs elsewhere than the second: nothing may be left in the process
    torch.randn(7)
    resumed = interrupted(-1, "-j", workers, "--resume", stopped.folder / "last.pth.tar", name="stopped")
    assert resumed.status == 0, resumed.err
    assert (whole.folder / "summary.csv").read_text() == (resumed.folder / "summary.csv").read_text()
    a, b = whole.checkpoint(), resumed.checkpoint()
    assert_same({key: a[key] for key in STATE}, {key: b[key] for key in STATE})


def test_the_rounding_of_a_moving_average_in_bfloat16_goes_on(interrupted):
    half = ("--model-dtype", "bfloat16", "--epochs", "1")
    whole = interrupted(-1, *half, name="whole")
    assert interrupted(2, *half, name="stopped").status == 128 + signal.SIGTERM
    resumed = interrupted(-1, *half, "--resume", "auto", name="stopped")
    assert resumed.status == 0, resumed.err
    assert_same(whole.checkpoint()["state_dict_ema"], resumed.checkpoint()["state_dict_ema"])


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")
@pytest.mark.slow
def test_a_plateau_goes_on_counting(train, register):
    """With the rate this low nothing improves: it is cut again and again, over an interrupt too."""
    register("eventful", Eventful)
    flags = ["--sched", "plateau", "--patience-epochs", "1", "--lr", "1e-6", "--epochs", "6", "--loss", "eventful"]
    Eventful.at = -1
    whole = train(*flags, name="whole")
    assert len({row["lr"] for row in whole.summary}) > 1
    Eventful.at, Eventful.calls = 15, 0
    assert train(*flags, name="stopped").status == 128 + signal.SIGTERM
    resumed = train(*flags, "--resume", "auto", name="stopped")
    assert resumed.summary == whole.summary


class Stream(torch.utils.data.IterableDataset):
    """The built-in data as a stream, shuffled by the epoch it is told."""

    transform = None

    def __init__(self, split):
        self.data = Hierarchy(split, size=96, superclasses=4, fine=3, pixel_noise=1.0)
        self.classes = self.data.classes
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        for i in torch.randperm(96, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            image, label = self.data[i]
            yield self.transform(image), label


def test_a_stream_goes_on_where_it_stopped(train, register):
    register("eventful", Eventful)
    registry.datasets.register("stream")(Stream)
    try:
        flags = [*TINY[4:], "--dataset", "topk/stream", "--loss", "eventful"]
        flags = [flag for flag in flags if flag not in ("superclasses=4", "fine=3", "pixel_noise=1.0")]
        Eventful.at, Eventful.calls = -1, 0
        whole = train(name="whole", tiny=flags)
        assert whole.status == 0, whole.err
        Eventful.at, Eventful.calls = 8, 0
        assert train(name="stopped", tiny=flags).status == 128 + signal.SIGTERM
        resumed = train("--resume", "auto", name="stopped", tiny=flags)
        assert resumed.summary == whole.summary
        Eventful.at = -1
        assert "is a stream" in train("--subset", "0.5", name="subset", tiny=flags).err
    finally:
        registry.datasets.unregister("stream")


def test_ctrl_c_finishes_the_update(interrupted):
    before = signal.getsignal(signal.SIGINT)  # not Python's where a shell started the tests in the background
    stopped = interrupted(3, name="stopped", signum=signal.SIGINT)
    assert stopped.status == 128 + signal.SIGINT
    progress = stopped.checkpoint()["task_state"]["progress"]
    assert (progress["epoch"], progress["step"]) == (0, 4)  # the third batch is the first half of an update
    assert "in epoch 1, after 4 of 6 batches" in stopped.err
    assert f"--config {stopped.folder}/args.yaml --resume {stopped.folder}/last.pth.tar" in stopped.err
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_that_come_twice_are_one_request(monkeypatch):
    with StopRequest() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
        monkeypatch.setattr(signals.time, "monotonic", lambda: stop._came + 0.5)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(signals.time, "monotonic", lambda: stop._came + 2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("program", "started"),
    [
        ("/bin/timm", "timm train"),
        ("/bin/topk-registry", "topk-registry train"),
        ("/bin/topk-train", "topk-train"),
        ("/lib/topk_registry/__main__.py", "python -m topk_registry train"),
        ("/bin/pytest", "timm train"),  # called from Python
    ],
)
def test_the_printed_command_is_the_one_that_started_the_run(monkeypatch, program, started):
    monkeypatch.setattr("sys.argv", [program])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert resume.command(Path("a b")) == f"{started} --config 'a b/args.yaml' --resume 'a b/last.pth.tar'"


def test_under_torchrun_it_has_the_number_of_processes_at_least(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/lib/topk_registry/__main__.py", "train", "--loss", "not the parent's"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resume.command(Path("run")).startswith("torchrun --nproc-per-node=4 -m topk_registry train --config run/")


def test_the_printed_command_resumes_in_place(interrupted, train):
    whole = interrupted(-1, name="whole")
    stopped = interrupted(5, name="stopped")
    Eventful.at = -1
    folder = stopped.folder
    resumed = train("--config", folder / "args.yaml", "--resume", folder / "last.pth.tar", tiny=(), name="stopped")
    assert resumed.status == 0, resumed.err
    assert resumed.summary == whole.summary


def test_resume_auto_finds_the_run_and_starts_anew_without_one(interrupted):
    first = interrupted(4, "--resume", "auto", name="auto")
    assert "starting anew" in first.out
    again = interrupted(-1, "--resume", "auto", name="auto")
    assert again.status == 0
    assert "epoch 1, batch 5" in again.out
    assert [row["epoch"] for row in again.summary] == [1, 2, 3]


def test_a_finished_run_can_be_prolonged(train):
    train("--epochs", "1", name="run")
    longer = train("--epochs", "3", "--resume", "auto", name="run")
    assert [row["epoch"] for row in longer.summary] == [1, 2, 3]


@pytest.mark.parametrize("sched", [["--sched-on-updates"], [], ["--sched", "step", "--decay-epochs", "1"]], ids=str)
def test_the_schedule_follows_a_new_number_of_epochs(train, sched):
    train("--epochs", "2", *sched, name="run")
    longer = train("--epochs", "4", *sched, "--resume", "auto", name="run")
    whole = train("--epochs", "4", *sched, name="whole")
    assert [row["lr"] for row in longer.summary[2:]] == [row["lr"] for row in whole.summary[2:]]
    assert "planned for 2 epochs before, now for 4: the schedule follows" in longer.out


def test_resume_auto_takes_only_a_run_with_its_settings(train, tmp_path):
    first = train("--loss", "topk_nll", "--loss-opt", "k=2", name="first")
    before = {path: path.read_bytes() for path in first.folder.iterdir()}
    other = train("--loss", "focal", "--resume", "auto", name="first")
    assert other.status == 2
    assert "loss: topk_nll -> focal" in other.err
    assert {path: path.read_bytes() for path in first.folder.iterdir()} == before
    anew = train("--loss", "focal", "--resume", "auto", name="")
    assert anew.status == 0
    assert "starting anew; the newest run" in anew.out
    assert {path: path.read_bytes() for path in first.folder.iterdir()} == before
    same = train("--loss", "topk_nll", "--loss-opt", "k=2", "--resume", "auto", "--epochs", "3", name="")
    assert f"resumed   {first.folder}" in same.out


def test_a_run_is_not_overwritten_unless_asked(train, tmp_path):
    first = train("--epochs", "2", name="run")
    (first.folder / "notes.txt").write_text("of people")
    before = {path: path.read_bytes() for path in first.folder.iterdir()}
    second = train("--loss", "focal", name="run")
    assert second.status == 2
    assert (
        second.err.strip()
        .splitlines()[-1]
        .endswith(
            f"{first.folder} holds another run: go on with it by --resume {first.folder / 'last.pth.tar'}, "
            "name another --experiment, or begin anew by --overwrite"
        )
    )
    elsewhere = train("--epochs", "1", name="elsewhere")
    mixed = train("--epochs", "3", "--resume", elsewhere.folder / "last.pth.tar", name="run")
    assert mixed.status == 2
    assert "holds another run" in mixed.err
    assert train("--dry-run", name="run").status == 0
    assert {path: path.read_bytes() for path in first.folder.iterdir()} == before
    anew = train("--epochs", "1", "--overwrite", name="run")
    assert anew.status == 0
    assert [row["epoch"] for row in anew.summary] == [1]
    assert sorted(path.name for path in anew.folder.glob("checkpoint-*")) == ["checkpoint-1.pth.tar"]
    assert (anew.folder / "notes.txt").read_text() == "of people"
    again = train("--config", anew.folder / "args.yaml", name="run", tiny=())
    assert again.status == 2
    assert "begin anew by --overwrite" in again.err


def test_overwrite_and_resume_contradict_each_other():
    with pytest.raises(ConfigError, match="--overwrite removes a run and --resume goes on with it: leave one out"):
        TrainConfig(overwrite=True, resume="auto")


def test_runs_that_begin_in_one_second_have_folders_of_their_own(train, tmp_path, monkeypatch):
    class Clock(begin.datetime):
        @classmethod
        def now(cls):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(begin, "datetime", Clock)
    for _ in range(3):
        assert train("--epochs", "1", name="").status == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name[15:] for name in names] == [names[0][15:], f"{names[0][15:]}-2", f"{names[0][15:]}-3"]
    assert {name[:15] for name in names} == {"20260102-030405"}


def test_a_folder_is_no_checkpoint(train, tmp_path):
    first = train("--epochs", "1", name="first")
    found = train("--resume", first.folder, name="other")
    assert found.status == 2
    assert f"is a folder, name the checkpoint in it: --resume {first.folder / 'last.pth.tar'}" in found.err
    assert "there is no checkpoint in it" in train("--resume", tmp_path, name="other").err


def test_resume_auto_knows_recovery_checkpoints(train, register):
    class Killed(torch.nn.Module):
        calls = 0

        def forward(self, logits, target):
            trains = logits.requires_grad and len(logits) == 16  # not the trial before training
            Killed.calls += trains
            if trains and Killed.calls == 9:
                raise SystemError("as if it were killed")
            return torch.nn.functional.cross_entropy(logits, target)

    register("killed", Killed)
    with pytest.raises(SystemError):
        train("--loss", "killed", "--recovery-interval", "1")
    resumed = train("--loss", "killed", "--recovery-interval", "1", "--resume", "auto")
    assert resumed.status == 0, resumed.err
    assert "recovery-2-2.pth.tar at epoch 2, batch 3" in resumed.out
    whole = train("--loss", "killed", name="whole")
    assert resumed.summary == whole.summary


def test_a_checkpoint_of_another_loss_gives_its_weights(train, register):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, logits, target):
            return torch.nn.functional.cross_entropy(self.scale * logits, target)

    register("scaled", Scaled)
    first = train("--loss", "smooth_topk_svm", "--epochs", "1", name="first")
    other = train("--loss", "scaled", "--resume", first.folder / "last.pth.tar", name="other")
    assert other.status == 0, other.err
    assert "was trained with loss 'smooth_topk_svm', not 'scaled'" in other.out
    assert "the optimizer begins anew" in other.out
    options = train("--loss", "smooth_topk_svm", "--loss-opt", "alpha=0.5", "--resume",
                    first.folder / "last.pth.tar", name="options")  # fmt: skip
    assert "not 'smooth_topk_svm' {'alpha': 0.5}" in options.out


@pytest.mark.parametrize("older", [False, True], ids=["with its defaults", "without"])
def test_a_run_keeps_a_default_that_has_changed_since(train, register, older, tmp_path):
    class Tempered(torch.nn.Module):
        former_defaults: ClassVar = {"tau": 2.0}

        def __init__(self, tau=2.0, *, k=3):
            super().__init__()
            self.tau = tau

        def forward(self, logits, target):
            return torch.nn.functional.cross_entropy(logits / self.tau, target)

    register("tempered", Tempered)
    whole = train("--loss", "tempered", "--epochs", "2", name="whole")
    first = train("--loss", "tempered", "--epochs", "1", name="first")
    settings = yaml.safe_load((first.folder / "args.yaml").read_text())
    assert settings["loss_record"]["defaults"] == {"tau": 2.0, "k": 3}
    if older:
        del settings["loss_record"]["defaults"]
        (first.folder / "args.yaml").write_text(yaml.safe_dump(settings))
    Tempered.__init__.__defaults__ = (0.5,)
    for where in (first.folder / "last.pth.tar", "auto"):
        settled = ("--loss", "tempered", "--epochs", "2", "--resume", where)
        resumed = train(*settled, name="first")
        assert resumed.status == 0, resumed.err
        assert "keeps tau=2.0, its default when the run began" in resumed.out
        assert "the state of that loss is left" not in resumed.out
        now = yaml.safe_load((resumed.folder / "args.yaml").read_text())
        assert (now["loss_opt"], now["loss_record"]["defaults"]) == ({}, {"tau": 2.0, "k": 3})
    assert resumed.summary[-1]["train_loss"] == pytest.approx(whole.summary[-1]["train_loss"], rel=0.2)
    alone = tmp_path / "elsewhere" / "last.pth.tar"  # without its args.yaml
    alone.parent.mkdir()
    shutil.copy(first.folder / "last.pth.tar", alone)
    moved = train("--loss", "tempered", "--epochs", "2", "--resume", alone, name="moved")
    assert "keeps tau=2.0" in moved.out
    assert "its default when" not in train("--loss", "ce", "--epochs", "2", "--resume", alone, name="other").out
    given = train("--loss", "tempered", "--loss-opt", "tau=0.5", "--epochs", "2", "--resume",
                  first.folder / "last.pth.tar", name="given")  # fmt: skip
    assert "its default when" not in given.out
    assert "not 'tempered' {'tau': 0.5}" in given.out
    assert "its default when" not in train("--loss", "tempered", "--epochs", "1", name="anew").out


def test_resuming_in_mid_epoch_with_other_batches_leaves_no_image_out(interrupted):
    stopped = interrupted(4, name="stopped")
    last = stopped.folder / "last.pth.tar"
    other = interrupted(-1, "-b", "8", "--resume", last, name="other")
    assert other.status == 0, other.err
    assert "at epoch 1, batch 9" in other.out  # 4 batches of 16 were done
    wider = interrupted(-1, "-b", "24", "--grad-accum-steps", "1", "--resume", last, name="wider")
    assert "at epoch 1, batch 3" in wider.out  # 64 images are 2 batches of 24 and a part, which is done again


def test_another_number_of_images_an_update_is_told_with_what_gives_as_many(train, tmp_path):
    first = train("--epochs", "1", name="first")
    two = first.checkpoint()  # as if two processes had written it
    two["task_state"]["random"] *= 2
    torch.save(two, tmp_path / "two.pth.tar")
    resumed = train("--resume", tmp_path / "two.pth.tar", name="fewer")
    assert resumed.status == 0, resumed.err
    told = "an update has 16 images now, 32 before (2 processes, now 1), at the same lr 0.01"
    assert f"{told}: for as many as before, -b 32 or --grad-accum-steps 2" in resumed.out
    for flags in (("-b", "32"), ("--grad-accum-steps", "2")):
        assert "an update has" not in train("--resume", tmp_path / "two.pth.tar", *flags, name="as-many").out
    no_rate = [flag for flag in TINY if flag not in ("--lr", "0.01")]
    rule = train("--resume", tmp_path / "two.pth.tar", tiny=no_rate, name="rule")
    assert "the rate follows, lr 0.0" in rule.out


def test_a_checkpoint_of_another_model_is_named_before_its_keys(train):
    first = train("--epochs", "1", name="first")
    other = train(
        "--model", "topk_mlp", "--model-kwargs", "width=5", "--resume", first.folder / "last.pth.tar", name="o"
    )
    assert other.status == 2
    assert f"cannot resume from {first.folder}/last.pth.tar: it is of model topk_convnet, not topk_mlp. " in other.err
    wider = train("--num-classes", "20", "--resume", first.folder / "last.pth.tar", name="wider")
    assert "it is of num classes 12, not 20. " in wider.err


def test_resuming_in_mid_epoch_needs_the_same_data(interrupted):
    stopped = interrupted(4, name="stopped")
    for more in (("size=48",), ("size=48", "-b", "8")):
        other = interrupted(-1, "--dataset-opt", *more, "--resume", stopped.folder / "last.pth.tar", name="other")
        assert other.status == 2
        assert "resume with the same data" in other.err


def test_a_checkpoint_of_timms_own_script_resumes_as_timm_does(train, tmp_path):
    first = train("--epochs", "1", name="first")
    checkpoint = first.checkpoint()
    plain = {key: checkpoint[key] for key in ("epoch", "arch", "state_dict", "optimizer", "version")}
    torch.save(plain, tmp_path / "timm.pth.tar")
    again = train("--epochs", "2", "--resume", tmp_path / "timm.pth.tar", name="again")
    assert again.status == 0, again.err
    assert [row["epoch"] for row in again.summary] == [2]
    assert "as timm resumes" in again.out


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no such checkpoint"), (b"not a checkpoint", "cannot resume from")]
)
def test_a_missing_or_broken_checkpoint_is_refused(train, tmp_path, content, message):
    path = tmp_path / "broken.pth.tar"
    if content is not None:
        path.write_bytes(content)
    run = train("--resume", path)
    assert run.status == 2
    assert message in run.err
