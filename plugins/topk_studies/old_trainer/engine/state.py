"""State of a run beside the weights, saved and restored so that the run goes on bit for bit.

timm's ``CheckpointSaver`` writes the file (beside the old one, then renamed), timm's ``resume_task_checkpoint`` reads
it; our part travels in the task's own state: the loss and its buffers, the schedule, every random stream of every
process, the history, and the place in the epoch. It is made of plain types, so that loading executes no code.
"""

import errno
import hashlib
import os
import random
import shutil
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from timm import utils
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry.losses.base import ClassificationLoss
from topk_registry.losses.ranks import sum_over_ranks, weighs_rows, weight_of_rows
from topk_registry.ops.targets.label_mixture import LabelMixture, Target
from topk_registry.train.errors import SaveError, TrainError
from topk_studies.old_trainer.report.progress import Progress

LAST = "last.pth.tar"
PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
LOSS = "loss."  # before the names of the loss's buffers
LITTLE_SPACE = 16 << 20  # bytes: a disk with less than this left, beside a half-written checkpoint, is full


class RegistryTask(ClassificationTask):
    """timm's classification task, whose checkpoints hold the loss and the run's state too."""

    criterion: nn.Module
    run_state: dict[str, Any]

    def __init__(self, model: nn.Module, criterion: nn.Module, *, loss: dict[str, Any], **settings: Any) -> None:
        super().__init__(model, criterion, **settings)
        self.loss = loss
        self.weighs_rows = weighs_rows(criterion)
        self.run_state = {}
        self.backend = "auto"  # of the operators; a run that goes on keeps it, or its numbers would round differently
        self.loaded_state: dict[str, Any] | None = None

    def weight_of(self, target: Target) -> Tensor | None:
        """The number [] that the loss's mean over all processes divides by; None where each row counts alike."""
        if not self.weighs_rows or isinstance(target, LabelMixture) or target.is_floating_point():
            return None
        assert isinstance(self.criterion, ClassificationLoss)
        return sum_over_ranks(weight_of_rows(self.criterion, target))

    def clip_gradients(self, value: float, mode: str) -> None:
        """Clip the gradients of the model as timm does."""
        utils.dispatch_clip_grad(self.get_clip_parameters(exclude_head="agc" in mode), value=value, mode=mode)

    def scale_gradients(self, optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
        """Multiply the gradients that backward passes of this update have left so far."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * factor

    def prepare_checkpoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather what a checkpoint saves from all processes; every process must call it."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer as checkpoints hold it."""
        return optimizer

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        return {} if ema else {"criterion": self.criterion.state_dict(), **self.run_state}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        if state and not ema:
            self.loaded_state = state
            if same_loss(self.loss, state.get("loss", self.loss)):  # another loss keeps the state it was built with
                self.criterion.load_state_dict(state.get("criterion", {}), strict=strict)


def same_loss(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records are of the same loss with the same options and weights.

    A record of an older run, which has no defaults, is compared by the options that were given.
    """
    facts = ("name", "class_weight", "pos_weight")
    whole = all("defaults" in each for each in (one, other))
    first, second = ({**(each["defaults"] if whole else {}), **each["options"]} for each in (one, other))
    return first == second and all(one.get(fact) == other.get(fact) for fact in facts)


def snapshot(task: RegistryTask, progress: Progress, scheduler: Any) -> None:
    """Put the run's state into the task; every process must call it."""
    random, sums, samples = zip(*all_ranks((random_state(), progress.loss_sum, progress.samples)), strict=True)
    task.run_state = {
        "loss": task.loss,
        "backend": task.backend,
        "progress": asdict(progress) | {"loss_sum": sum(sums), "samples": sum(samples)},
        "scheduler": _counts(scheduler),
        "random": list(random),
        "sums": [list(each) for each in zip(sums, samples, strict=True)],
        "buffers": _differing_buffers(task),
        "rounding": None if (stream := _rounding_stream(task)) is None else stream.get_state(),
    }


def restore(
    task: RegistryTask, progress: Progress, scheduler: Any, *, rank: int, world: int, update_steps: int = 1
) -> bool:
    """Restore the state of the loaded checkpoint; return False if it has none, as one of timm's own script.

    ``update_steps`` is the number of steps of an update: with batches of another size the epoch goes on at the last
    update before the images that were seen, so that none is left out.
    """
    state = task.loaded_state
    if not state or "progress" not in state:
        return False
    saved = Progress(**state["progress"])
    if saved.step and not saved.same_images(progress):
        raise TrainError(
            f"the checkpoint was saved after {saved.step} of {saved.steps_per_epoch} batches of an epoch, which has "
            f"{progress.steps_per_epoch} now: resume with the same data"
        )
    if saved.batch and progress.batch and saved.batch != progress.batch:
        step = min(saved.step * saved.batch // progress.batch, progress.steps_per_epoch)
        saved.step = step - step % update_steps
    saved.steps_per_epoch, saved.batch = progress.steps_per_epoch, progress.batch
    sums = state.get("sums", ())
    own = sums[rank] if len(sums) == world else (saved.loss_sum / world, saved.samples / world)
    saved.loss_sum, saved.samples = own
    progress.__dict__.update(vars(saved))
    task.backend = state.get("backend", "auto")
    _set_counts(scheduler, state["scheduler"])
    if len(state["random"]) == world:  # else each process begins a stream of its own
        set_random_state(state["random"][rank])
    stream = _rounding_stream(task)
    if stream is not None and state.get("rounding") is not None:
        stream.set_state(state["rounding"])
    return True


def restore_buffers(task: RegistryTask, *, rank: int, world: int) -> None:
    """Give this process its own buffers back, after the wrapper for several processes gave it the first one's."""
    state = task.loaded_state or {}
    saved = state.get("buffers", ())
    if len(saved) == world:
        own = _buffers(task)
        for name, value in saved[rank].items():
            if name in own and (same_loss(task.loss, state["loss"]) or not name.startswith(LOSS)):
                own[name].copy_(value)


def _differing_buffers(task: RegistryTask) -> list[dict[str, Tensor]]:
    """For each process its buffers that are not those of the first, such as statistics of its own batches."""
    own = {name: value.detach().cpu() for name, value in _buffers(task).items()}
    digests = all_ranks({name: _digest(value) for name, value in own.items()})
    if all(each == digests[0] for each in digests):
        return [{} for _ in digests]
    return all_ranks({name: value for name, value in own.items() if _digest(value) != digests[0][name]})


def _buffers(task: RegistryTask) -> dict[str, Tensor]:
    """The saved buffers of the model, its moving average and the loss, under the names of these parts."""
    models = {"model.": task.get_trainable_module(), "ema.": task.get_trainable_module(ema=True)}
    parts = {name: utils.unwrap_model(model) for name, model in models.items() if model is not None}
    buffers = {}
    for part, module in {**parts, LOSS: task.criterion}.items():
        kept = module.state_dict()
        buffers |= {f"{part}{name}": value for name, value in module.named_buffers() if name in kept}
    return buffers


def _rounding_stream(task: RegistryTask) -> torch.Generator | None:
    """The random stream by which a moving average in bfloat16 is rounded; the same in all processes."""
    return getattr(task.get_trainable_module(ema=True), "_sr_generator", None)


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def random_state() -> dict[str, Any]:
    """The random streams of Python, NumPy and PyTorch in this process, as plain types and tensors."""
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


class NumberedSaver(CheckpointSaver):
    """timm's saver, whose files are numbered from 1 as epochs are for people; inside them timm counts from 0."""

    def _checkpoint_path(self, epoch: int) -> str:
        return super()._checkpoint_path(epoch + 1)


class Checkpoints:
    """Checkpoints in a run's folder; a failed write leaves the last good one in its place."""

    def __init__(self, saver: CheckpointSaver) -> None:
        self.saver = saver
        self.last = os.path.join(saver.checkpoint_dir, LAST)

    def epoch(self, epoch: int, metric: float | None) -> None:
        """Save after an epoch: ``last``, and where it is good enough one of the best and ``model_best``."""
        self._guarded(lambda: self.saver.save_checkpoint(epoch, metric=metric))

    def milestone(self, epochs: int) -> None:
        """Keep the checkpoint that was just saved, after so many epochs, whatever becomes of the others."""
        self._guarded(lambda: self.saver.save_milestone(epochs))

    def now(self, epoch: int, step: int) -> None:
        """Save in the middle of an epoch: ``last`` alone."""

        def write() -> None:
            self.saver.save_recovery(epoch, batch_idx=step)
            os.replace(self.saver.curr_recovery_file, self.last)

        self._guarded(write)

    def recovery(self, epoch: int, step: int) -> None:
        """Save in the middle of an epoch, beside the other checkpoints."""

        def write() -> None:
            self.saver.save_recovery(epoch, batch_idx=step)
            numbered = os.path.join(self.saver.recovery_dir, f"recovery-{epoch + 1}-{step}.pth.tar")
            os.replace(self.saver.curr_recovery_file, numbered)
            self.saver.curr_recovery_file = numbered

        self._guarded(write)

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except (OSError, RuntimeError) as error:  # PyTorch's archive writer reports a full disk as a RuntimeError
            reason = f"{error}"
            free = shutil.disk_usage(self.saver.checkpoint_dir).free
            if free < LITTLE_SPACE or getattr(error, "errno", None) in FULL:
                reason = f"the disk is full, {free >> 20} MiB are free ({error})"
            for half in ("tmp.pth.tar", "recovery_tmp.pth.tar"):
                path = os.path.join(self.saver.checkpoint_dir, half)
                if os.path.exists(path):
                    os.remove(path)
            kept = f"; the checkpoint before it is whole: {self.last}" if os.path.exists(self.last) else ""
            raise SaveError(f"could not write a checkpoint to {self.saver.checkpoint_dir}: {reason}{kept}") from error


def _counts(scheduler: Any) -> dict[str, Any]:
    """The state of timm's plateau schedule; every other schedule is a function of the epoch or the update."""
    inner = getattr(scheduler, "lr_scheduler", None)
    return {} if inner is None else {"restore_lr": scheduler.restore_lr, **{n: getattr(inner, n) for n in PLATEAU}}


def _set_counts(scheduler: Any, counts: dict[str, Any]) -> None:
    inner = getattr(scheduler, "lr_scheduler", None)
    if inner is not None and counts:
        scheduler.restore_lr = counts["restore_lr"]
        vars(inner).update({name: counts[name] for name in PLATEAU})


def all_ranks(value: Any) -> list[Any]:
    """The value of each process, in the order of their ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
