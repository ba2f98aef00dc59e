"""Open a run's folder, and go on from a checkpoint where one is asked for."""

import math
import os
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from timm import utils
from timm.models import safe_model_name
from timm.task import load_task_ema_checkpoint, resume_task_checkpoint
from timm.utils.checkpoint_saver import load_checkpoint_metadata
from torch import distributed as dist

from topk_registry.train.engine.resume import OUTPUT, differences, find_auto
from topk_registry.train.engine.state import LAST, Checkpoints, restore, same_loss
from topk_registry.train.errors import TrainError
from topk_registry.train.setup.build import Run, distribute

SETTLED = ("lr", "num_classes", "dist_bn")  # None in the flags, and a number in a checkpoint


def begin(run: Run, written: dict[str, Any]) -> None:
    """Resume if asked, wrap the model, and open the run's folder; nothing is written before the resuming worked.

    Args:
        run: the parts of the run.
        written: its settings as they were given, for args.yaml.
    """
    args = run.args
    found: list[Path | None] = [None, None]
    if utils.is_primary(args):
        resume = _resume_path(run, written)
        found = [_folder(args, resume), resume]
    if args.distributed:
        dist.broadcast_object_list(found, src=0)
    run.folder, resume = found
    if args.model_ema:
        run.task.setup_ema(
            decay=args.model_ema_decay,
            use_warmup=args.model_ema_warmup,
            device=torch.device("cpu") if args.model_ema_force_cpu else None,
        )
    saver = _saver(run) if utils.is_primary(args) else None
    if resume:
        _resume(run, resume, written)
        if saver is not None and resume.parent == run.folder:
            saver.load_state_dict_from_checkpoint(str(resume))
            saver.curr_recovery_file = str(resume) if resume.name != LAST else ""  # to be deleted when its turn comes
    elif args.start_epoch:
        run.progress.epoch = args.start_epoch
        _place_schedule(run)
    if saver is not None:
        _open_folder(run, written)
        run.checkpoints = Checkpoints(saver)
    distribute(run)


def _open_folder(run: Run, written: dict[str, Any]) -> None:
    assert run.folder is not None
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"cannot make the run's folder {run.folder}: {error}") from error
    run.report.folder = run.folder
    run.report.arguments({**written, "loss_record": run.loss})


def _saver(run: Run) -> utils.CheckpointSaver:
    run.args.loss_record = run.loss
    return utils.CheckpointSaver(
        model=run.model,
        optimizer=run.optimizer,
        args=run.args,
        amp_scaler=run.compute.scaler,
        checkpoint_dir=str(run.folder),
        recovery_dir=str(run.folder),
        decreasing=run.decreasing,
        max_history=run.args.checkpoint_hist,
        task=run.task,
    )


def _resume(run: Run, path: Path, written: dict[str, Any]) -> None:
    args = run.args
    try:
        saved = load_checkpoint_metadata(str(path))
        keep = not args.no_resume_opt and _optimizer_fits(run, saved)
        epoch = resume_task_checkpoint(
            run.task,
            str(path),
            optimizer=run.optimizer if keep else None,
            loss_scaler=run.compute.scaler if keep else None,
            log_info=False,
        )
        if args.model_ema:
            load_task_ema_checkpoint(run.task, str(path))
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise TrainError(f"cannot resume from {path}: {error}") from error
    whole = keep and args.start_epoch is None and restore(
        run.task, run.progress, run.scheduler, rank=args.rank, world=args.world_size
    )  # fmt: skip
    if not whole:
        run.progress.epoch = args.start_epoch if args.start_epoch is not None else epoch or 0
    _place_schedule(run)
    place = f"epoch {run.progress.epoch + 1}" + (f", batch {run.progress.step + 1}" if run.progress.step else "")
    run.report.say(f"resumed   {path} at {place}" + ("" if whole else " (weights only, as timm resumes)"))
    for note in _notes(run, saved, written):
        run.report.say(f"          {note}")


def _optimizer_fits(run: Run, saved: Any) -> bool:
    """Whether the optimizer has the groups of the checkpoint's: a loss that learns brings one of its own."""
    groups = saved.get("optimizer", {}).get("param_groups") if isinstance(saved, dict) else None
    sizes = [[len(group["params"]) for group in each] for each in (groups or (), run.optimizer.param_groups)]
    return groups is None or sizes[0] == sizes[1]


def _notes(run: Run, saved: Any, written: dict[str, Any]) -> list[str]:
    """Sentences on how this run differs from the one that wrote the checkpoint."""
    record, before = (run.task.loaded_state or {}).get("loss"), saved.get("args") if isinstance(saved, dict) else None
    notes = []
    if record and not same_loss(record, run.loss):
        names = [f"{each['name']!r} {each['options'] or ''}".rstrip() for each in (record, run.loss)]
        notes.append(f"the checkpoint was trained with loss {names[0]}, not {names[1]}: the state of that loss is left")
        if not _optimizer_fits(run, saved):
            notes.append("the optimizer begins anew: it has other parameters with this loss")
    old = vars(before) if isinstance(before, Namespace) else {}
    if old.get("epochs", run.args.epochs) != run.args.epochs:
        notes.append(f"planned for {old['epochs']} epochs before, now for {run.args.epochs}: the schedule follows, and "
                     f"goes on at lr {run.lr:.3g}")  # fmt: skip
    settled = {name: value for name, value in written.items() if value is not None and name not in SETTLED}
    differ = differences({name: value for name, value in old.items() if name not in ("loss", "loss_opt")}, settled)
    return notes + ([f"other settings than the checkpoint's: {'; '.join(differ)}"] if differ else [])


def _place_schedule(run: Run) -> None:
    """Set the learning rate of the place that the run is at; a plateau's rate came with the optimizer."""
    progress, scheduler = run.progress, run.scheduler
    if scheduler is None or hasattr(scheduler, "lr_scheduler"):
        return
    update = progress.epoch * run.updates_per_epoch + math.ceil(progress.step / run.args.grad_accum_steps)
    if update:
        scheduler.step_update(update)
    if progress.epoch:
        scheduler.step(progress.epoch)


def _resume_path(run: Run, written: dict[str, Any]) -> Path | None:
    args = run.args
    if args.resume == "auto":
        path, note = find_auto(args, written)
        if note:
            run.report.say(note)
        return path
    if args.resume and not os.path.isfile(args.resume):
        raise TrainError(f"--resume {args.resume}: there is no such checkpoint")
    return Path(args.resume) if args.resume else None


def _folder(args: Namespace, resume: Path | None) -> Path:
    if resume and not args.experiment and (resume.parent / "args.yaml").exists():
        return resume.parent
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(args.output or OUTPUT) / (args.experiment or f"{stamp}-{safe_model_name(args.model)}-{args.loss}")
