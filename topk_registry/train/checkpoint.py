"""Save and resume runs.

timm's ``CheckpointSaver`` writes a checkpoint, and timm's ``resume_task_checkpoint`` reads a checkpoint. timm combines
model and loss in an object called task. The tasks in this module add a dictionary to each checkpoint. The dictionary
has the metrics of all epochs, and the states of the loss and of the random generators. All values of the dictionary
have plain types, so that loading a checkpoint executes no code.
"""

import os
import random
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from timm.task import ClassificationTask, load_task_ema_checkpoint, resume_task_checkpoint
from timm.task.classification import MultiLabelClassificationTask
from timm.utils import CheckpointSaver
from torch import distributed as dist
from torch import nn

from topk_registry import files
from topk_registry.errors import SaveError, TrainError
from topk_registry.train.config import TrainConfig
from topk_registry.train.model import PREPROCESSING, read_checkpoint
from topk_registry.train.run import Progress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LAST = "last.pth.tar"
OUTPUT = "output/train"
RESULTS = ("*.pth.tar", "summary.csv", "curves.svg")  # names of files that show that a run used the folder

# Settings that may change when a run is resumed: duration, location, speed, and output.
FREE = {
    *("resume", "epochs", "early_stop", "output", "experiment", "dry_run", "overwrite", "device", "workers", "pin_mem"),
    *("channels_last", "torchcompile", "grad_checkpointing", "log_interval", "val_interval", "validation_batch_size"),
    *("checkpoint_hist", "eval_metric", "multi_crop", "marginal_temperature", "dataset_download", "log"),
}
# Settings that a run resolves if they are not set.
RESOLVED = {"num_classes", "lr", *PREPROCESSING}
Decision = TypeVar("Decision")


class RunState:
    """Mixin for a timm task (model and loss): each checkpoint of the task also saves the state of the run."""

    criterion: nn.Module
    loss_record: dict[str, Any]
    run_state: dict[str, Any]  # saved in the next checkpoint
    loaded: dict[str, Any]  # the run_state in the checkpoint that was loaded

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        return {} if ema else self.run_state

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        if not ema:
            self.loaded = state or {}


class SingleLabelTask(RunState, ClassificationTask):
    """timm's task (model and loss) for images with one label. Its checkpoints also save the state of the run."""


class SeveralLabelsTask(RunState, MultiLabelClassificationTask):
    """timm's task (model and loss) for images with several labels. Its checkpoints also save the state of the run."""


def create_task(
    model: nn.Module, criterion: nn.Module, *, multilabel: bool, record: dict[str, Any], **about: Any
) -> Any:
    """Return timm's task for a model and a loss. With ``multilabel``, an image may have several labels.

    ``record`` has the name and the options of the loss, for checkpoints. ``about`` has further arguments of the task.
    """
    kind: Any = SeveralLabelsTask if multilabel else SingleLabelTask
    task = kind(model, criterion, verbose=False, **about)
    task.loss_record, task.run_state, task.loaded = record, {}, {}
    return task


class Saver(CheckpointSaver):
    """timm's CheckpointSaver, with epochs counted from 1 in file names. A failed write leaves the old file intact."""

    def _checkpoint_path(self, epoch: int) -> str:
        return super()._checkpoint_path(epoch + 1)

    def _replace(self, src: str, dst: str) -> None:
        files.move(src, dst)

    def _duplicate(self, src: str, dst: str) -> None:
        half = f"{dst}.tmp"
        with suppress(FileNotFoundError):
            os.unlink(half)
        try:
            os.link(src, half)
        except OSError:  # the file system has no hard links
            shutil.copy2(src, half)
        files.move(half, dst)

    def save(self, epoch: int, metric: float | None) -> None:
        """Save a checkpoint after an epoch, counted from 0, or raise a SaveError and keep the previous file.

        ``metric`` ranks the checkpoints. If the epoch was not evaluated, ``metric`` is None.
        """
        self._write(lambda: self.save_checkpoint(epoch, metric))

    def save_last(self, epoch: int) -> None:
        """Save only the checkpoint from which a run continues, for an epoch whose evaluation is not complete."""
        last, half = (os.path.join(self.checkpoint_dir, name) for name in (LAST, "tmp.pth.tar"))

        def write() -> None:
            self._save(half, epoch)
            self._replace(half, last)

        self._write(write)

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
            with suppress(OSError):
                os.remove(os.path.join(self.checkpoint_dir, "tmp.pth.tar"))
            free = shutil.disk_usage(self.checkpoint_dir).free >> 20
            raise SaveError(f"cannot write a checkpoint to {self.checkpoint_dir} ({free} MiB free): {error}") from error


def snapshot(task: Any, progress: Progress) -> None:
    """Store the run's state in ``task.run_state`` for the next checkpoint. Every process must call this function."""
    states = all_ranks((generator_states(), {name: v.cpu() for name, v in task.criterion.state_dict().items()}))
    ema = task.get_trainable_module(ema=True)
    task.run_state = {
        "loss": task.loss_record,
        "progress": asdict(progress),
        "generators": [each[0] for each in states],
        "criterion": [each[1] for each in states],
        "ema_generator": None if ema is None else ema._sr_generator.get_state(),
    }


def resume(task: Any, path: Path, *, optimizer: Any, scaler: Any, rank: int, world: int) -> tuple[Progress, list[str]]:
    """Restore a checkpoint of this trainer or of timm's script, or raise a TrainError.

    A checkpoint of timm's script has weights, optimizer and epoch. A checkpoint of this trainer also has the history,
    the schedule and the state of the loss. If the run now has another loss or other options of the loss, the state of
    the loss is not restored. Another version of the loss is the same loss, if it has the same options or more. The
    trainer later calls :func:`restore_generators`. ``rank`` is the index of this process among ``world`` processes.

    Returns:
        The completed epochs, and messages for the log.
    """
    options = {*optimizer.defaults}  # before loading, which may add names
    try:
        epoch = resume_task_checkpoint(task, str(path), optimizer=optimizer, loss_scaler=scaler, log_info=False)
        if any(options - group.keys() for group in optimizer.param_groups):
            raise ValueError("it has another optimizer")
        if task.has_ema():
            load_task_ema_checkpoint(task, str(path))
        state, record = task.loaded, task.loss_record
        saved = {"defaults": {}, **(state.get("loss") or settings_in(path).get("loss_record") or {})}
        known = {"version": record["version"], "defaults": record["defaults"] | saved["defaults"]}
        same = bool(state) and record == saved | known
        if same:
            states = state["criterion"]
            task.criterion.load_state_dict(states[rank] if len(states) == world else states[0])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        name, classes = (settings_in(path).get(key) for key in ("model", "num_classes"))
        origin = f"it has model {name} with {classes} classes. " if name else ""
        raise TrainError(f"cannot resume from {path}: {origin}{error}") from error
    if "progress" not in state:
        done = Progress(epoch or 0)
        restored = f"restored  weights, optimizer and epoch {done.epoch} of timm's checkpoint, not the random state"
        other = "name" in saved and (saved["name"], saved["options"]) != (record["name"], record["options"])
        return done, [restored, *([_other_loss(saved)] if other else [])]
    notes = [] if same else [_other_loss(saved)]
    if task.has_ema() and state["ema_generator"] is not None:
        task.get_trainable_module(ema=True)._sr_generator.set_state(state["ema_generator"])
    if len(state["generators"]) != world:
        notes.append(f"          {world} processes, not {len(state['generators'])}: random numbers will differ")
    done = Progress(**state["progress"])
    return done, [f"resumed   {path} after epoch {done.epoch}", *notes]


def _other_loss(saved: Mapping[str, Any]) -> str:
    options = " ".join(f"{name}={value}" for name, value in saved.get("options", {}).items())
    return f"          the checkpoint has another loss or other options: {saved['name']!r} {options}".rstrip()


def restore_generators(task: Any, rank: int, world: int) -> None:
    states = task.loaded.get("generators", ())
    if len(states) == world:
        set_generator_states(states[rank])


def generator_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_generator_states(state: Mapping[str, Any]) -> None:
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def all_ranks(value: Any) -> list[Any]:
    """Return a list with the value of each process, in the order of the ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def folder_of(config: TrainConfig) -> Path | None:
    return Path(config.output or OUTPUT, config.experiment) if config.experiment else None


def shared(decide: Callable[[], Decision]) -> Decision:
    """Return the result of ``decide`` in the first process, in every process. A TrainError is raised everywhere."""
    if not (dist.is_available() and dist.is_initialized()):
        return decide()
    decision: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            decision[0] = decide()
        except TrainError as error:
            decision[1] = str(error)
    dist.broadcast_object_list(decision, src=0)
    if decision[1] is not None:
        raise TrainError(decision[1])
    return decision[0]


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Create a folder, and keep other processes out within the ``with`` block.

    If another process trains in the folder, or the folder cannot be created, raise a TrainError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainError(f"cannot open the folder {folder}: {error}") from error
    if fcntl is None or handle is None:  # Windows
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise TrainError(f"another run trains in {folder}: choose another --experiment or --output") from None
    except OSError:  # the file system has no locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def results(folder: Path) -> list[Path]:
    return [path for pattern in RESULTS for path in sorted(folder.glob(pattern))]


def check_folder(config: TrainConfig) -> None:
    """Raise a TrainError if the folder of ``--experiment`` has a run, unless a flag resumes or overwrites this run."""
    folder = folder_of(config)
    if folder is None or config.overwrite or config.dry_run or config.resume == "auto":
        return
    if config.resume and Path(config.resume).resolve().parent == folder.resolve():
        return
    if results(folder):
        raise TrainError(f"{folder} holds another run: --resume auto continues that run, --overwrite deletes it")


def resume_path(config: TrainConfig) -> tuple[Path | None, str]:
    """Return the checkpoint to resume from and a message for the log, or raise a TrainError.

    Without ``--resume``, return (None, ""). ``--resume auto`` selects the newest checkpoint whose settings have no
    :func:`differences` from ``config``. If there is no such checkpoint, return (None, message).
    """
    if config.resume != "auto":
        path = Path(config.resume) if config.resume else None
        if path is not None and path.is_dir():
            raise TrainError(f"--resume {path} is a folder: name the checkpoint, such as {path / LAST}")
        if path is not None and not path.is_file():
            raise TrainError(f"--resume {path}: there is no such checkpoint")
        return path, ""
    folder, root = folder_of(config), Path(config.output or OUTPUT)
    paths = [each / LAST for each in ([folder] if folder else root.glob("*")) if (each / LAST).is_file()]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        differ = differences(settings_in(path), config)
        if not differ:
            return path, ""
        if folder:
            raise TrainError(f"--resume auto: {folder} has other settings: {'; '.join(differ)}")
    return None, f"--resume auto: no checkpoint of this run in {folder or root}, starting a new run"


def differences(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Return a text such as ``lr: 0.1 -> 0.2`` for each setting that differs between a saved run and ``config``.

    Skip settings that may change when a run is resumed, such as ``epochs``. A setting that ``config`` leaves empty is
    compared too, unless the saved run has resolved this setting, such as the number of classes.
    """
    now = {name: value for name, value in config.to_dict().items() if name not in FREE}
    now = {name: value for name, value in now.items() if name not in RESOLVED or value not in (None, "")}
    return [f"{name}: {saved[name]} -> {now[name]}" for name in now if name in saved and saved[name] != now[name]]


def settings_in(checkpoint: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint records, or {}. Raise a TrainError if the file is not a checkpoint."""
    args = read_checkpoint(checkpoint).get("args")
    return vars(args) if isinstance(args, Namespace) else {}


def continue_command(folder: Path) -> str:
    """Return the shell command that continues a run. If torchrun started this process, the command uses torchrun."""
    program = Path(sys.argv[0])
    words = ["python", "-m", "topk_registry"] if program.name == "__main__.py" else [program.name]
    if program.stem not in ("__main__", "timm", "topk-registry", "topk-train"):
        words = ["timm"]  # the run was started from Python
    if "TORCHELASTIC_RUN_ID" in os.environ:
        words = ["torchrun", f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}", "-m", "topk_registry"]
    words += [] if words[-1] == "topk-train" else ["train"]
    return shlex.join([*words, "--config", str(folder / "args.yaml"), "--resume", "auto"])
