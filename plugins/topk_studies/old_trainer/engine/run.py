"""A training run: its parts, its place, and the hooks that watch it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.metric_names import LOSSES
from topk_studies.old_trainer.engine.evaluate import Evaluator
from topk_studies.old_trainer.engine.state import Checkpoints, RegistryTask, snapshot
from topk_studies.old_trainer.report.console import Report
from topk_studies.old_trainer.report.loggers import Loggers
from topk_studies.old_trainer.report.progress import Progress, Row
from topk_studies.old_trainer.setup.compute import Compute
from topk_studies.old_trainer.setup.datasets import Data
from topk_studies.old_trainer.setup.loaders import TrainLoader
from topk_studies.old_trainer.setup.loss import LossSpec
from topk_studies.old_trainer.setup.parts import Parts


@dataclass(frozen=True)
class Hooks:
    """Functions that a run calls, in every process.

    Args:
        on_step: after each batch, with the run and the loss of the batch.
        on_epoch: after each epoch, with the run and the epoch's row of the summary.
        on_evaluate: after each evaluation, with the run, the evaluated model and the metrics; returns further metrics,
            or None.
    """

    on_step: Callable[["Run", float], object] | None = None
    on_epoch: Callable[["Run", Row], object] | None = None
    on_evaluate: Callable[["Run", nn.Module, dict[str, float]], Mapping[str, float] | None] | None = None


@dataclass
class Run:
    """Parts and state of a training run.

    Args:
        given: the configuration as it was given.
        config: the same with what was left open settled: classes, learning rate.
        parts: a caller's own parts.
        num_epochs: epochs of the schedule, with warm-up and cool-down.
        folder: where the run writes, once it is open.
        checkpoints: writes them; on the first process alone, and not in a dry run.
        loggers: of the first process; elsewhere there are none.
        weight_of_update: of the batches so far of an update, where rows have weights.
        stopped: whether a stop was asked for.
    """

    given: TrainConfig
    config: TrainConfig
    compute: Compute
    data: Data
    loss: LossSpec
    loader: TrainLoader
    task: RegistryTask
    optimizer: torch.optim.Optimizer
    scheduler: Any
    num_epochs: int
    evaluator: Evaluator | None
    progress: Progress
    report: Report
    parts: Parts = field(default_factory=Parts)
    hooks: Hooks = field(default_factory=Hooks)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    checkpoints: Checkpoints | None = None
    loggers: Loggers = field(default_factory=Loggers)
    weight_of_update: Tensor | float = 0.0
    stopped: Callable[[], bool] = lambda: False

    @property
    def model(self) -> nn.Module:
        """The trained model, in the wrapper that exchanges gradients if there is one."""
        model = self.task.get_trainable_module()
        assert model is not None
        return model

    @property
    def lr(self) -> float:
        """Mean learning rate of the optimizer's groups."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return sum(rates) / len(rates)

    @property
    def updates_per_epoch(self) -> int:
        return -(-len(self.loader) // self.config.grad_accum_steps)

    @property
    def updates(self) -> int:
        """Number of updates of the weights that are done."""
        in_epoch = math.ceil(self.progress.step / self.config.grad_accum_steps)
        return self.progress.epoch * self.updates_per_epoch + in_epoch

    @property
    def metric(self) -> str:
        """The name of the metric that picks checkpoints, as the summary's columns have it."""
        return f"eval_{self.config.eval_metric}" if self.evaluator is not None else "train_loss"

    @property
    def decreasing(self) -> bool:
        return self.metric == "train_loss" or self.config.eval_metric in LOSSES

    def snapshot(self) -> None:
        """Bring the state that a checkpoint saves up to date; every process must call it."""
        snapshot(self.task, self.progress, self.scheduler)
        self.task.prepare_checkpoint(self.optimizer)

    def save_now(self) -> None:
        """Save the state in the middle of an epoch as the last checkpoint."""
        self.snapshot()
        if self.checkpoints is not None:
            self.checkpoints.now(max(0, self.progress.epoch - 1), self.progress.step)

    def save_recovery(self) -> None:
        """Save the state in the middle of an epoch as a recovery checkpoint."""
        self.snapshot()
        if self.checkpoints is not None:
            self.checkpoints.recovery(self.progress.epoch, self.progress.step)
