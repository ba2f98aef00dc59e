"""Train and evaluate all epochs of a run, with the same order of steps as timm's training script.

The loss stays on the device and is copied to the CPU only for logging.
"""

import math
from contextlib import nullcontext

import torch
from timm import utils
from torch import Tensor

from topk_registry.errors import Interrupted, NonFiniteLossError
from topk_registry.train import checkpoint
from topk_registry.train.checkpoint import Saver
from topk_registry.train.evaluation import evaluate, evaluation_options, readable
from topk_registry.train.loss import set_epoch
from topk_registry.train.run import Row, Run


def run_epochs(run: Run, saver: Saver | None) -> None:
    """Train to the last epoch, or until ``--early-stop`` ends the run. After a signal, raise :class:`Interrupted`.

    ``saver`` writes the checkpoints. None: another process writes them.
    """
    progress = run.progress
    if _stops_early(run):  # a resumed run
        return
    while progress.epoch < run.num_epochs:
        epoch = progress.epoch
        set_epoch(run.task.criterion, epoch)
        run.report.begin_epoch()
        if progress.unevaluated is None:  # else a signal stopped the evaluation of this epoch
            progress.unevaluated = train_epoch(run, epoch)
        if progress.unevaluated is None:
            raise _interrupted(run)
        checkpoint.snapshot(run.task, progress)  # the evaluation draws random numbers
        row = measure(run, progress.unevaluated)
        if row is None:
            if saver is not None:
                saver.save(epoch, None, evaluated=False)
            raise _interrupted(run)
        value = row.get(run.metric)
        progress.close(row, value, run.decreasing)
        if run.scheduler is not None:
            run.scheduler.step(epoch + 1)
        checkpoint.snapshot(run.task, progress)
        if saver is not None:
            saver.save(epoch, value)
        run.report.epoch_done(run, row)
        if run.on_epoch is not None:
            run.on_epoch(run, row)
        if _stops_early(run):
            return
        if run.should_stop() and progress.epoch < run.num_epochs:
            raise _interrupted(run)


def _stops_early(run: Run) -> bool:
    stagnates = 0 < run.config.early_stop <= run.progress.stale
    if stagnates:
        run.report.say(f"stopped early: no better {run.metric} in {run.progress.stale} evaluations")
    return stagnates


def train_epoch(run: Run, epoch: int) -> float | None:
    """Train one epoch, counted from 0. Return the mean loss, or None if a signal stopped the epoch.

    Raises:
        NonFiniteLossError: the loss became NaN or infinite.
    """
    config, task, device = run.config, run.task, run.compute.device
    run.loader.set_epoch(epoch)
    run.model.train()
    batches, steps = len(run.loader), config.grad_accum_steps
    updates = epoch * run.updates_per_epoch
    # The sum is in double precision, except on MPS, which has no double precision.
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    samples = 0
    run.optimizer.zero_grad()
    for batch, (images, target) in enumerate(readable(run.loader)):
        update = batch // steps
        accumulated = min(steps, batches - update * steps)  # batches of this update
        needs_update = batch + 1 == update * steps + accumulated
        with nullcontext() if needs_update else task.no_sync():
            with run.compute.autocast():
                loss = task(images, target)["loss"] / accumulated
            _backward(run, loss, needs_update)
        value = loss.detach()
        total += value.to(total.dtype) * accumulated * len(images)
        samples += len(images)
        if run.on_step is not None:
            run.on_step(run, value)
        if not needs_update:
            continue
        updates += 1
        run.optimizer.zero_grad()
        task.update_ema(step=updates)
        waited = not run.compute.distributed and run.report.silent()  # with several processes, all must call _show
        if update % config.log_interval == 0 or batch == batches - 1 or waited:
            _show(run, value * accumulated, total / samples, update, samples)
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
    run.report.update(run, update, now, average, samples * run.compute.world_size)


def _mean(run: Run, value: Tensor) -> float:
    return (utils.reduce_tensor(value, run.compute.world_size) if run.compute.distributed else value).item()


def measure(run: Run, loss: float) -> Row | None:
    """Evaluate the model after an epoch, and the EMA weights if the run has them. Return the metrics by name.

    The result also has the learning rate and ``loss``, the training loss. Without evaluation data, or if the setting
    ``val_interval`` skips this epoch, nothing is evaluated. If a signal stops the evaluation, return None.
    """
    config, world, number = run.config, run.compute.world_size, run.progress.epoch + 1
    row: Row = {"epoch": number, "train_loss": loss, "lr": run.lr}
    weights = {"eval_": False, "ema_": True} if config.model_ema else {"eval_": False}
    if run.compute.distributed and config.dist_bn and not config.sync_bn:
        for ema in weights.values():
            utils.distribute_bn(run.task.get_trainable_module(ema=ema), world, config.dist_bn == "reduce")
    if run.eval_loader is None or (number % config.val_interval and number != run.num_epochs):
        return row
    options = evaluation_options(config, run.compute, run.task.criterion, run.data.counts)
    batches = len(run.eval_loader)
    for prefix, ema in weights.items():

        def progress(batch: int, name: str = "Test (EMA)" if ema else "Test") -> bool:
            run.report.testing(name, batch, batches, config.log_interval)
            return not run.compute.distributed and bool(run.stop)  # with several processes, a signal does not stop this

        metrics = evaluate(run.task.get_eval_model(ema=ema), run.eval_loader, progress=progress, **options)
        if metrics is None:
            return None
        row |= {prefix + name: value for name, value in metrics.items()}
    return row


def _interrupted(run: Run) -> Interrupted:
    epoch = run.progress.epoch
    kept = f"epoch {epoch} is saved" if epoch else "no epoch is complete"
    if run.progress.unevaluated is not None:
        kept = f"epoch {epoch + 1} is trained and saved, without its evaluation"
    if not run.own_parts:
        kept += f"; continue with\n  {checkpoint.continue_command(run.folder)}"
    return Interrupted(run.stop.signum or 15, kept)
