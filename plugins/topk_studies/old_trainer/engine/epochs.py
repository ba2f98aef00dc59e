"""The epochs of a run: training, evaluation, checkpoints, and what a stop or an error leaves behind."""

import os
import time

from timm import utils

from topk_registry.train.errors import DataError, Interrupted, TrainError
from topk_studies.old_trainer.engine import resume
from topk_studies.old_trainer.engine.loop import agree, mean_loss, train_epoch
from topk_studies.old_trainer.engine.run import Run
from topk_studies.old_trainer.engine.signals import StopRequest
from topk_studies.old_trainer.engine.state import LAST
from topk_studies.old_trainer.report.console import label
from topk_studies.old_trainer.report.progress import Row
from topk_studies.old_trainer.setup.loss import tell_epoch
from topk_studies.old_trainer.setup.unreadable import report_unreadable


def run_epochs(run: Run, stop: StopRequest) -> None:
    """Train to the last epoch, or to where ``--stop-epoch``, ``--early-stop`` or a signal ends it.

    Raises:
        Interrupted: a signal came; the run is saved, where it has a folder.
        TrainError: it cannot go on.
    """
    progress, config = run.progress, run.config
    run.stopped = lambda: bool(stop)
    if run.evaluator is not None and not run.compute.distributed:  # alone, evaluation may stop half-way
        run.evaluator.stop = run.stopped
    last = config.stop_epoch or run.num_epochs
    while progress.epoch < last:
        began = time.perf_counter()
        tell_epoch(run.task.criterion, progress.epoch)
        try:
            row = _measure(run) if train_epoch(run) else None
        except DataError as error:
            raise _data_lost(run, error) from error
        if row is None:
            run.save_now()
            raise _interrupted(run, stop)
        _say_unreadable(run)
        _close_epoch(run, row)
        run.report.epoch(row, time.perf_counter() - began)
        if run.hooks.on_epoch is not None:
            run.hooks.on_epoch(run, row)
        if config.early_stop and progress.stale >= config.early_stop:
            run.report.say(f"stopped early: no better {label(run.metric)} in {progress.stale} evaluations")
            return
        if agree(run, bool(stop), False)[0] and progress.epoch < last:
            raise _interrupted(run, stop)
    if last < run.num_epochs:
        on = how_to_resume(run, "Go on", f" --stop-epoch {run.num_epochs}")
        run.report.say("\n".join(filter(None, [f"stopped after epoch {last}, as --stop-epoch says", on])))


def _measure(run: Run) -> Row | None:
    """The epoch's row of the summary, or None if its evaluation was stopped."""
    config, epoch = run.config, run.progress.epoch
    model = run.model
    if run.compute.distributed and config.dist_bn in ("broadcast", "reduce"):
        utils.distribute_bn(model, run.compute.world_size, config.dist_bn == "reduce")
    row: Row = {"epoch": epoch + 1, "train_loss": mean_loss(run), "lr": run.lr}
    asked = (run.num_epochs, config.stop_epoch, *config.save_epochs)
    due = (epoch + 1) % config.val_interval == 0 or epoch + 1 in asked
    if run.evaluator is None or not due:
        return row
    averaged = run.task.has_ema() and not config.model_ema_force_cpu
    if averaged and run.compute.distributed and config.dist_bn in ("broadcast", "reduce"):
        utils.distribute_bn(run.task.get_trainable_module(ema=True), run.compute.world_size, config.dist_bn == "reduce")
    evaluated = run.task.get_eval_model(ema=averaged)
    assert evaluated is not None
    metrics = run.evaluator(evaluated, run.task.criterion)
    if metrics is None:
        return None
    if run.hooks.on_evaluate is not None:
        metrics |= run.hooks.on_evaluate(run, evaluated, metrics) or {}
        if not run.compute.distributed and run.stopped():  # the hook may have measured less than it wanted
            return None
    if run.metric.removeprefix("eval_") not in metrics:
        raise TrainError(f"--eval-metric {config.eval_metric} is not measured here; there are {', '.join(metrics)}")
    return row | {f"eval_{name}": value for name, value in metrics.items()}


def _say_unreadable(run: Run) -> None:
    for dataset, kind in ((run.data.train, "training"), (run.data.validation, "evaluation")):
        line = report_unreadable(dataset, kind)
        if line:
            run.report.say(f"          {line}")


def _close_epoch(run: Run, row: Row) -> None:
    progress, value = run.progress, row.get(run.metric)
    epoch = progress.epoch
    progress.history.append(row)
    if value is not None:
        progress.note(value, decreasing=run.decreasing)
    if run.scheduler is not None:
        run.scheduler.step(epoch + 1, value)
    progress.next_epoch()
    run.snapshot()
    if run.checkpoints is not None:
        run.checkpoints.epoch(epoch, value)
        if epoch + 1 in run.config.save_epochs:
            run.checkpoints.milestone(epoch + 1)
    run.report.write(progress.history)
    run.loggers.epoch(row)


def _interrupted(run: Run, stop: StopRequest) -> Interrupted:
    error = Interrupted(stop.signum or 15)
    error.args = (f"stopped {_where(run)}. {how_to_resume(run)}",)
    return error


def _data_lost(run: Run, error: DataError) -> DataError:
    message = str(error).rpartition(f"{DataError.__name__}: ")[2]  # a loader's worker adds its traceback
    root = run.config.data_dir
    if root and not os.path.exists(root):
        message = f"the data directory {root} has vanished ({error})"
    if run.compute.distributed:  # the other processes cannot join in saving
        return DataError(message)
    if run.progress.step < run.progress.steps_per_epoch:  # an update that was not finished begins anew
        run.progress.step -= run.progress.step % run.config.grad_accum_steps
    run.save_now()
    return DataError(f"{message}; stopped {_where(run)}")


def _where(run: Run) -> str:
    progress = run.progress
    if progress.step:
        return f"in epoch {progress.epoch + 1}, after {progress.step} of {progress.steps_per_epoch} batches"
    return f"after epoch {progress.epoch}"


def how_to_resume(run: Run, promise: str = "Nothing is lost: go on", flags: str = "") -> str:
    """The command that goes on with the run; empty where there is no checkpoint, and outside the first process."""
    if run.folder is None or not run.compute.primary or not (run.folder / LAST).exists():
        return ""
    if run.parts.any:  # which the command line cannot bring
        return f'{promise} with the same parts and TrainConfig(resume="{run.folder / LAST}", ...)'
    return f"{promise} with\n  {resume.command(run.folder)}{flags}"
