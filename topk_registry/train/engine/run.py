"""``timm train``: from the command line to the last epoch."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from timm import utils
from torch import distributed as dist

from topk_registry.train.engine import resume
from topk_registry.train.engine.begin import begin
from topk_registry.train.engine.loop import agree, mean_loss, train_epoch
from topk_registry.train.engine.signals import StopRequest
from topk_registry.train.engine.state import LAST, Row
from topk_registry.train.errors import DataError, Interrupted, TrainError
from topk_registry.train.setup.build import Run, build, distribute
from topk_registry.train.setup.compute import Compute
from topk_registry.train.setup.datasets import name_of
from topk_registry.train.setup.preflight import check
from topk_registry.train.setup.unreadable import report_unreadable


def train(args: Namespace) -> int:
    """Run what the flags say; the exit status is 0, 1 for a run that broke off, 2 for one that could not begin."""
    try:
        return _train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(args: Namespace) -> int:
    written = dict(vars(args))
    try:
        notes = check(args)
        run = build(args, Compute.set_up(args))
        _say_plan(run, [*notes, *run.compute.notes])
        if args.dry_run:
            return _dry_run(run)
        begin(run, written)
    except TrainError as error:
        return _fail(error, 2)
    try:
        with StopRequest() as stop:
            run_epochs(run, stop)
    except Interrupted as error:
        return _fail(error, 128 + error.signum) if utils.is_primary(args) else 128 + error.signum
    except TrainError as error:
        return _fail(error, 1, how_to_resume(run, "Go on") if utils.is_primary(args) else "")
    run.report.finish(run.progress)
    return 0


def run_epochs(run: Run, stop: StopRequest) -> None:
    """Train to the last epoch, or to where ``--early-stop`` or a signal ends it.

    Raises:
        Interrupted: a signal came; the run is saved, where it has a folder.
        TrainError: it cannot go on.
    """
    progress, args = run.progress, run.args
    if run.evaluator is not None and not args.distributed:  # alone, evaluation may stop half-way
        run.evaluator.stop = lambda: bool(stop)
    while progress.epoch < run.num_epochs:
        began = time.perf_counter()
        _set_epoch(run)
        try:
            row = _measure(run) if train_epoch(run, lambda: bool(stop)) else None
        except DataError as error:
            raise _data_lost(run, error) from error
        if row is None:
            run.save_now()
            raise _interrupted(run, stop)
        _say_unreadable(run)
        _close_epoch(run, row)
        run.report.epoch(row, time.perf_counter() - began)
        if args.early_stop and progress.stale >= args.early_stop:
            run.report.say(f"stopped early: no better {run.metric} in {progress.stale} evaluations")
            return
        if agree(run, bool(stop), False)[0] and progress.epoch < run.num_epochs:
            raise _interrupted(run, stop)


def _set_epoch(run: Run) -> None:
    set_epoch = getattr(run.task.criterion, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(run.progress.epoch)


def _measure(run: Run) -> Row | None:
    """The epoch's row of the summary, or None if its evaluation was stopped."""
    args, epoch = run.args, run.progress.epoch
    model = run.model
    if args.distributed and args.dist_bn in ("broadcast", "reduce"):
        utils.distribute_bn(model, args.world_size, args.dist_bn == "reduce")
    row: Row = {"epoch": epoch, "train_loss": mean_loss(run), "lr": run.lr}
    due = (epoch + 1) % args.val_interval == 0 or epoch + 1 == run.num_epochs
    if run.evaluator is None or not due:
        return row
    averaged = run.task.has_ema() and not args.model_ema_force_cpu
    if averaged and args.distributed and args.dist_bn in ("broadcast", "reduce"):
        utils.distribute_bn(run.task.get_trainable_module(ema=True), args.world_size, args.dist_bn == "reduce")
    evaluated = run.task.get_eval_model(ema=averaged)
    assert evaluated is not None
    metrics = run.evaluator(evaluated, run.task.criterion)
    if metrics is None:
        return None
    if run.metric.removeprefix("eval_") not in metrics:
        raise TrainError(f"--eval-metric {args.eval_metric} is not measured here; there are {', '.join(metrics)}")
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
    run.report.write(progress.history)


def _dry_run(run: Run) -> int:
    """One batch forward and backward; nothing is written."""
    distribute(run)
    images, target = next(iter(run.loader.pass_of(0)))
    run.model.train()
    with run.compute.autocast():
        result = run.task(images.to(run.compute.device, run.compute.dtype), target.to(run.compute.device))
    result["loss"].backward()
    kind = f"{'soft targets' if target.is_floating_point() else 'labels'} {list(target.shape)}"
    run.report.say(f"dry run   images {list(images.shape)}, {kind}: loss {result['loss'].item():.4f}, gradients made")
    return 0


def _say_plan(run: Run, notes: Sequence[str]) -> None:
    args, data = run.args, run.data
    options = [f"{name}={value}" for name, value in run.loss["options"].items()]
    owner = f"({run.loss['distribution']} {run.loss['version']})" if run.loss["distribution"] else ""
    parameters = sum(p.numel() for p in run.model.parameters()) / 1e6
    processes = f", {args.world_size} processes" if args.distributed else ""
    batch = args.batch_size * args.world_size * args.grad_accum_steps
    sizes = f"{_size(data.train)} to train, {_size(data.validation)} to evaluate, {args.num_classes} classes"
    lines = [
        " ".join(filter(None, ["loss     ", args.loss, *options, owner])),
        f"data      {name_of(args)}: {sizes}",
        *(f"          {note}" for note in [*data.notes, *notes]),
        f"model     {args.model}, {parameters:.2f} M parameters, on {run.compute.device}{processes}",
        f"optimizer {args.opt}, lr {args.lr:g} {args.sched}, batch {batch}, {run.num_epochs} epochs of "
        f"{run.updates_per_epoch} updates",
    ]
    run.report.say("\n".join(lines))


def _size(dataset: object) -> str:
    try:
        return f"{len(dataset)}"  # pyright: ignore[reportArgumentType]
    except TypeError:
        return "none" if dataset is None else "a stream"


def _interrupted(run: Run, stop: StopRequest) -> Interrupted:
    error = Interrupted(stop.signum or 15)
    error.args = (f"stopped {_where(run)}. {how_to_resume(run)}",)
    return error


def _data_lost(run: Run, error: DataError) -> DataError:
    message = str(error).rpartition(f"{DataError.__name__}: ")[2]  # a loader's worker adds its traceback
    root = run.args.data_dir
    if root and not os.path.exists(root):
        message = f"the data directory {root} has vanished ({error})"
    if run.args.distributed:  # the other processes cannot join in saving
        return DataError(message)
    if run.progress.step < run.progress.steps_per_epoch:  # an update that was not finished begins anew
        run.progress.step -= run.progress.step % run.args.grad_accum_steps
    run.save_now()
    return DataError(f"{message}; stopped {_where(run)}")


def _where(run: Run) -> str:
    progress = run.progress
    if progress.step:
        return f"in epoch {progress.epoch + 1}, after {progress.step} of {progress.steps_per_epoch} batches"
    return f"after epoch {progress.epoch}"


def how_to_resume(run: Run, promise: str = "Nothing is lost: go on") -> str:
    """The command that goes on with the run, empty where there is no checkpoint yet."""
    if run.folder is None or not (run.folder / LAST).exists():
        return ""
    return f"{promise} with\n  {resume.command(run.folder)}"


def _fail(error: TrainError, status: int, advice: str = "") -> int:
    print("\n".join(filter(None, [f"timm train: {error}", advice])), file=sys.stderr)
    return status
