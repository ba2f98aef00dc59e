"""Train one epoch, with the same order of steps as timm's training script.

The loss stays on the device and is copied to the CPU only for logging.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from timm import utils
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry.errors import NonFiniteLossError
from topk_registry.train.checkpoint import Progress, Saver, StopRequest
from topk_registry.train.config import DECREASING, TrainConfig
from topk_registry.train.data import Data, TrainLoader
from topk_registry.train.evaluation import readable
from topk_registry.train.loss import LossSpec
from topk_registry.train.model import Compute
from topk_registry.train.report import Report


@dataclass
class Run:
    """Parts and state of a training run.

    Args:
        config: settings of the run, including number of classes, learning rate and preprocessing.
        spec: name, options and package of the loss.
        criterion: the loss.
        eval_loader: evaluation batches, or None.
        task: timm's object that combines model and loss.
        own_parts: whether the user passed a model or loaders to :class:`Trainer`.
        control: process group on the CPU, in which all processes agree whether to stop. None for one process.
    """

    config: TrainConfig
    compute: Compute
    data: Data
    spec: LossSpec
    criterion: nn.Module
    loader: TrainLoader
    eval_loader: Any
    task: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    num_epochs: int
    report: Report
    preprocessing: dict[str, Any]
    own_parts: bool = False
    on_step: Callable[["Run", Tensor], object] | None = None
    on_epoch: Callable[["Run", dict[str, float]], object] | None = None
    progress: Progress = field(default_factory=Progress)
    stop: StopRequest = field(default_factory=StopRequest)
    saver: Saver | None = None
    folder: Path | None = None
    control: Any = None
    resumed: Path | None = None  # the checkpoint from which the run continues
    reason: str = ""  # why the metric selects checkpoints
    kernels: list[str] = field(default_factory=list)  # why the loss has no compiled kernels
    stamp: str = field(default_factory=lambda: datetime.now().strftime("%Y%m%d-%H%M%S"))

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
    def updates_per_epoch(self) -> int:
        return -(-len(self.loader) // self.config.grad_accum_steps)

    @property
    def metric(self) -> str:
        """Name of the metric that selects checkpoints, or "train_loss" without evaluation data."""
        if self.eval_loader is None:
            return "train_loss"
        return ("ema_" if self.config.model_ema else "eval_") + self.config.metric

    @property
    def decreasing(self) -> bool:
        return self.metric.removeprefix("eval_").removeprefix("ema_") in DECREASING

    def should_stop(self) -> bool:
        """Return whether any process received a signal to stop. Every process must call this method."""
        if self.control is None:
            return bool(self.stop)
        flag = torch.tensor([bool(self.stop)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flag.item())


def train_epoch(run: Run, epoch: int) -> float | None:
    """Train one epoch, counted from 0. Return the mean loss, or None if a signal stopped the epoch.

    Raises:
        NonFiniteLossError: the loss became NaN or infinite.
    """
    config, task, device = run.config, run.task, run.compute.device
    run.loader.set_epoch(epoch)
    run.model.train()
    batches, accum = len(run.loader), config.grad_accum_steps
    last_accum = batches % accum
    updates = epoch * run.updates_per_epoch
    # The sum is in double precision, except on MPS, which has no double precision.
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    samples = 0
    run.report.begin_epoch(epoch, run.updates_per_epoch)
    run.optimizer.zero_grad()
    for batch, (images, target) in enumerate(readable(run.loader)):
        last = batch == batches - 1
        update = batch // config.grad_accum_steps
        needs_update = last or (batch + 1) % config.grad_accum_steps == 0
        if batch >= batches - last_accum:
            accum = last_accum
        if config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.enable_grad() if needs_update or not run.compute.distributed else task.no_sync():
            with run.compute.autocast():
                loss = task(images, target)["loss"]
            if accum > 1:
                loss = loss / accum
            _backward(run, loss, needs_update)
        value = loss.detach()
        total += value.to(total.dtype) * accum * len(images)
        samples += len(images)
        if run.on_step is not None:
            run.on_step(run, value)
        if not needs_update:
            continue
        updates += 1
        run.optimizer.zero_grad()
        task.update_ema(step=updates)
        waited = not run.compute.distributed and run.report.silent()  # with several processes, all must call _show
        if update % config.log_interval == 0 or last or waited:
            _show(run, value * accum, total / samples, update, samples)
        if run.scheduler is not None:
            run.scheduler.step_update(num_updates=updates)
        if run.should_stop():
            return None
    if callable(sync := getattr(run.optimizer, "sync_lookahead", None)):
        sync()
    return _mean(run, total / max(1, samples))


def _backward(run: Run, loss: Tensor, needs_update: bool) -> None:
    config, optimizer = run.config, run.optimizer
    second_order = getattr(optimizer, "is_second_order", False)
    clipped = run.task.get_clip_parameters(exclude_head="agc" in config.clip_mode) if config.clip_grad else None
    if run.compute.scaler is not None:
        run.compute.scaler(loss, optimizer, config.clip_grad, config.clip_mode, clipped, second_order, needs_update)
        return
    loss.backward(create_graph=second_order)
    if needs_update:
        if clipped is not None and config.clip_grad is not None:
            utils.dispatch_clip_grad(clipped, value=config.clip_grad, mode=config.clip_mode)
        optimizer.step()


def _show(run: Run, value: Tensor, mean: Tensor, update: int, samples: int) -> None:
    now, average = _mean(run, value), _mean(run, mean)
    if not math.isfinite(average):
        raise NonFiniteLossError(
            f"the loss of epoch {run.progress.epoch + 1} became {average} by update {update + 1}: try a lower --lr, "
            "--clip-grad, or --amp-dtype bfloat16"
        )
    run.report.update(update, now, average, run.lr, samples * run.compute.world_size)


def _mean(run: Run, value: Tensor) -> float:
    return (utils.reduce_tensor(value, run.compute.world_size) if run.compute.distributed else value).item()
