"""The parts and the state of one training run."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry import files
from topk_registry.errors import SaveError
from topk_registry.train.config import DECREASING, TrainConfig

if TYPE_CHECKING:  # these modules import this module
    from topk_registry.train.data import Data, TrainLoader
    from topk_registry.train.loss import LossSpec
    from topk_registry.train.model import Compute
    from topk_registry.train.report import Report

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAME_REQUEST = 1.0  # a signal that repeats within this many seconds belongs to the same stop request
Row = dict[str, float]  # metrics of one epoch by name


@dataclass
class Progress:
    """The completed epochs of a run.

    Args:
        epoch: number of completed epochs.
        history: one dictionary of metrics per completed epoch.
        best: best value of the metric that selects checkpoints, or None before the first evaluation.
        best_epoch: index of the best epoch, counted from 0.
        stale: number of evaluations since the best evaluation.
        metric: name of the metric that selects checkpoints.
        unevaluated: training loss of the next epoch if this epoch is trained, but a signal stopped its evaluation.
    """

    epoch: int = 0
    history: list[Row] = field(default_factory=list)
    best: float | None = None
    best_epoch: int | None = None
    stale: int = 0
    metric: str = ""
    unevaluated: float | None = None

    def rank(self, metric: str, *, same_folder: bool) -> bool:
        """Select checkpoints by ``metric``. Return whether the best epoch so far still counts.

        It counts if it was the best by the same metric and if its checkpoint is in the same folder.
        """
        counts = same_folder and self.metric in ("", metric)
        if not counts:
            self.best, self.best_epoch, self.stale = None, None, 0
        self.metric = metric
        return counts

    def close(self, row: Row, value: float | None, decreasing: bool) -> None:
        """Append the metrics ``row`` of a completed epoch to the history, and update the best epoch.

        ``value`` is the metric that selects the best epoch, or None. With ``decreasing``, lower values are better.
        """
        self.history.append(row)
        if value is not None and (self.best is None or (value < self.best if decreasing else value > self.best)):
            self.best, self.best_epoch, self.stale = value, self.epoch, 0
        elif value is not None:
            self.stale += 1
        self.epoch += 1
        self.unevaluated = None

    @property
    def best_row(self) -> Row:
        """Metrics of the best epoch, else of the last epoch (if no epoch was evaluated), else {}."""
        rows = [row for row in self.history if row["epoch"] - 1 == self.best_epoch] or self.history[-1:]
        return rows[0] if rows else {}


class StopRequest:
    """Context manager that records SIGINT, SIGTERM and SIGHUP instead of stopping the process.

    ``signum`` is the first signal that arrived, or 0. ``bool(request)`` is True after a signal. If Ctrl-C is pressed
    again, KeyboardInterrupt is raised. Other repeated signals are ignored, because batch systems send SIGTERM to a
    process and again to its process group. At exit, the old signal handlers are restored.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._time = 0.0
        self._old: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum != 0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for signum in SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and this must not change
                    self._old[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._time = signum, time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._time > SAME_REQUEST:
            raise KeyboardInterrupt


@dataclass
class Run:
    """Parts and state of a training run. :func:`topk_registry.train.trainer.build` creates a complete object.

    Args:
        config: settings of the run, including number of classes, learning rate and preprocessing.
        spec: name, options and package of the loss.
        eval_loader: evaluation batches, or None.
        task: timm's object that combines model and loss.
        updates_per_epoch: number of updates of the weights in an epoch.
        resumed: the checkpoint from which the run continues, or None.
        own_parts: whether the user passed a model or loaders to :class:`Trainer`.
        folder: folder of the run. Training creates the folder.
    """

    config: TrainConfig
    compute: "Compute"
    data: "Data"
    spec: "LossSpec"
    loader: "TrainLoader"
    eval_loader: Any
    task: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    num_epochs: int
    updates_per_epoch: int
    report: "Report"
    folder: Path
    resumed: Path | None = None
    own_parts: bool = False
    on_step: Callable[["Run", Tensor], object] | None = None
    on_epoch: Callable[["Run", Row], object] | None = None
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def model(self) -> nn.Module:
        """The model in training. With several processes, this is the wrapper that averages the gradients."""
        return self.task.get_trainable_module()

    @property
    def lr(self) -> float:
        """Mean learning rate of the parameter groups."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return sum(rates) / len(rates)

    @property
    def metric(self) -> str:
        """Name of the metric that selects checkpoints, or "train_loss" without evaluation data."""
        if self.eval_loader is None:
            return "train_loss"
        return ("ema_" if self.config.model_ema else "eval_") + self.config.metric

    @property
    def decreasing(self) -> bool:
        """Whether lower values of the metric are better."""
        return self.metric.removeprefix("eval_").removeprefix("ema_") in DECREASING

    def should_stop(self) -> bool:
        """Return whether any process received a signal to stop. Every process must call this method."""
        if not self.compute.distributed:
            return bool(self.stop)
        flag = torch.tensor([bool(self.stop)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.compute.control)
        return bool(flag.item())


def write_text(path: str | Path, text: str) -> None:
    """Replace the content of a file durably, see :func:`topk_registry.files.write_text`, or raise a SaveError."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise SaveError(f"cannot write {path}: {error}") from error
