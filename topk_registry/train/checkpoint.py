"""Save and resume runs.

timm's ``CheckpointSaver`` writes a checkpoint, and timm's ``resume_task_checkpoint`` reads a checkpoint. timm combines
model and loss in an object called task. The task in this module adds a dictionary to each checkpoint. The dictionary
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from timm.task import ClassificationTask, load_task_ema_checkpoint, resume_task_checkpoint
from timm.utils import CheckpointSaver
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry import files
from topk_registry.errors import DataError, SaveError, TrainError
from topk_registry.ops.distributed import number_of_ranks
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


class RunTask(ClassificationTask):
    """timm's task (model and loss). Each checkpoint of the task also saves the state of the run.

    Args:
        record: name and options of the loss.
        multilabel: whether an image may have several labels, so that targets must be k-hot vectors.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        *,
        record: dict[str, Any],
        multilabel: bool,
        device: torch.device,
    ) -> None:
        super().__init__(model, criterion, device=device, verbose=False)
        self.multilabel = multilabel
        self.loss_record = record
        self.run_state: dict[str, Any] = {}  # saved in the next checkpoint
        self.loaded: dict[str, Any] = {}  # the run_state in the checkpoint that was loaded

    def forward(self, input: Tensor, target: Any) -> dict[str, Tensor]:
        if self.multilabel and not (target.ndim == 2 and target.is_floating_point()):  # some losses accept labels, too
            found = f"{target.dtype} {list(target.shape)}"
            raise DataError(f"--task multilabel needs floating-point targets [batch, classes], got {found}")
        return super().forward(input, target)

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        return {} if ema else self.run_state

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        if not ema:
            self.loaded = state or {}


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

    def save(self, epoch: int, metric: float | None, *, evaluated: bool = True) -> None:
        """Save a checkpoint after an epoch, counted from 0, or raise a SaveError and keep the previous file.

        ``metric`` ranks the checkpoints. If ``val_interval`` skips the evaluation of the epoch, ``metric`` is None.
        With ``evaluated=False``, after a signal in the evaluation, save only the checkpoint from which a run continues.
        """
        half, last = (os.path.join(self.checkpoint_dir, name) for name in ("tmp.pth.tar", LAST))
        try:
            if evaluated:
                self.save_checkpoint(epoch, metric)
            else:
                self._save(half, epoch)
                self._replace(half, last)
        except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
            with suppress(OSError):
                os.remove(half)
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


def resume(
    task: Any, path: Path, saved: Mapping[str, Any], *, optimizer: Any, scaler: Any, rank: int, world: int
) -> tuple[Progress, list[str]]:
    """Restore a checkpoint of this trainer or of timm's script, or raise a TrainError.

    A checkpoint of timm's script has weights, optimizer and epoch. A checkpoint of this trainer also has the history,
    the schedule and the state of the loss. If the run now has another loss or other options of the loss, the state of
    the loss is not restored. Another version of the loss is the same loss, if it has the same options or more. The
    trainer later calls :func:`restore_generators`. ``saved`` has the settings in the checkpoint. ``rank`` is the index
    of this process among ``world`` processes.

    Returns:
        The completed epochs, and messages for the log.
    """
    try:
        epoch = resume_task_checkpoint(task, str(path), optimizer=optimizer, loss_scaler=scaler, log_info=False)
        if task.has_ema():
            load_task_ema_checkpoint(task, str(path))
        state, record = task.loaded, task.loss_record
        before = state.get("loss") or saved.get("loss_record") or {}
        defaults = record["defaults"] | before.get("defaults", {})
        same = record == {**record, **before, "version": record["version"], "defaults": defaults}
        if same and state:
            states = state["criterion"]
            task.criterion.load_state_dict(states[rank] if len(states) == world else states[0])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        name, classes = saved.get("model"), saved.get("num_classes")
        origin = f"it has model {name} with {classes} classes. " if name else ""
        raise TrainError(f"cannot resume from {path}: {origin}{error}") from error
    notes: list[str] = []
    if not same:
        loss = " ".join([f"{before['name']!r}", *(f"{name}={value}" for name, value in before["options"].items())])
        notes.append(f"          the checkpoint has another loss or other options: {loss}")
    if "progress" not in state:
        done = Progress(epoch or 0)
        return done, [f"restored  weights, optimizer and epoch {done.epoch} of timm's, not the random state", *notes]
    if task.has_ema() and state["ema_generator"] is not None:
        task.get_trainable_module(ema=True)._sr_generator.set_state(state["ema_generator"])
    if len(state["generators"]) != world:
        notes.append(f"          {world} processes, not {len(state['generators'])}: random numbers will differ")
    done = Progress(**state["progress"])
    return done, [f"resumed   {path} after epoch {done.epoch}", *notes]


def restore_generators(task: Any, rank: int, world: int) -> None:
    """Restore the random generators from the checkpoint that was loaded, unless it has another number of processes."""
    states = task.loaded.get("generators", ())
    if len(states) != world:
        return
    state = states[rank]
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def generator_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def all_ranks(value: Any) -> list[Any]:
    """Return a list with the value of each process, in the order of the ranks."""
    gathered = [value] * number_of_ranks()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def shared(decide: Callable[[], Decision]) -> Decision:
    """Return the result of ``decide`` in the first process, in every process. A TrainError is raised everywhere."""
    decision: Any = None
    failed: TrainError | None = None
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        try:
            decision = decide()
        except TrainError as error:
            failed = error
    decision, failed = all_ranks((decision, failed))[0]
    if failed is not None:
        raise failed
    return decision


def folder_of(config: TrainConfig) -> Path | None:
    return Path(config.output or OUTPUT, config.experiment) if config.experiment else None


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Create a folder, and keep other processes out within the ``with`` block.

    If another process trains in the folder, or the folder cannot be created, raise a TrainError.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise TrainError(f"cannot open the folder {folder}: {error}") from error
        if fcntl is not None and handle is not None:  # else Windows
            held.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainError(f"another run trains in {folder}: choose another --experiment or --output") from None
            except OSError:  # the file system has no locks
                pass
        yield


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
