"""Opens a run's folder, and goes on from a checkpoint where one is asked for."""

import os
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from pickle import UnpicklingError

import torch
from timm import utils
from timm.models import safe_model_name
from timm.task import load_task_ema_checkpoint, resume_task_checkpoint
from torch import distributed as dist

from topk_registry.train.engine.state import LAST, Checkpoints, restore
from topk_registry.train.errors import TrainError
from topk_registry.train.setup.build import Run, distribute

OUTPUT = Path("output", "train")


def begin(run: Run, written: dict[str, object]) -> None:
    """Resume if asked, wrap the model, and open the run's folder."""
    args = run.args
    resume = _resume_path(run)
    folder = [_folder(args, resume)]
    if args.distributed:
        dist.broadcast_object_list(folder, src=0)
    run.folder = folder[0]
    if args.model_ema:
        run.task.setup_ema(
            decay=args.model_ema_decay,
            use_warmup=args.model_ema_warmup,
            device=torch.device("cpu") if args.model_ema_force_cpu else None,
        )
    if utils.is_primary(args):
        _open_folder(run, written)
    if resume:
        _resume(run, resume)
    elif args.start_epoch:
        _start_at(run, args.start_epoch)
    distribute(run)


def _open_folder(run: Run, written: dict[str, object]) -> None:
    assert run.folder is not None
    run.args.loss_record = run.loss
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"cannot make the run's folder {run.folder}: {error}") from error
    run.report.folder = run.folder
    run.report.arguments({**written, "loss_record": run.loss})
    saver = utils.CheckpointSaver(
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
    run.checkpoints = Checkpoints(saver)


def _resume(run: Run, path: Path) -> None:
    args = run.args
    keep = not args.no_resume_opt
    try:
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
    if run.checkpoints is not None and path.parent == run.folder:
        run.checkpoints.saver.load_state_dict_from_checkpoint(str(path))
    whole = keep and args.start_epoch is None and restore(
        run.task, run.progress, run.scheduler, rank=args.rank, world=args.world_size
    )  # fmt: skip
    if not whole:
        _start_at(run, args.start_epoch if args.start_epoch is not None else epoch or 0)
    trained = (run.task.loaded_state or {}).get("loss", {}).get("name", args.loss)
    if trained != args.loss:
        run.report.say(f"          the checkpoint was trained with loss {trained!r}, not {args.loss!r}")
    place = f"epoch {run.progress.epoch + 1}" + (f", batch {run.progress.step + 1}" if run.progress.step else "")
    run.report.say(f"resumed   {path} at {place}" + ("" if whole else " (weights only, as timm resumes)"))


def _start_at(run: Run, epoch: int) -> None:
    run.progress.epoch = epoch
    if run.scheduler is not None and epoch:
        if run.args.sched_on_updates:
            run.scheduler.step_update(epoch * run.updates_per_epoch)
        else:
            run.scheduler.step(epoch)


def _resume_path(run: Run) -> Path | None:
    args = run.args
    if args.resume != "auto":
        if args.resume and not os.path.isfile(args.resume):
            raise TrainError(f"--resume {args.resume}: there is no such checkpoint")
        return Path(args.resume) if args.resume else None
    root = Path(args.output or OUTPUT)
    found = [root / args.experiment / LAST] if args.experiment else list(root.glob(f"*/{LAST}"))
    found = sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime)
    if not found:
        run.report.say(f"--resume auto: no {LAST} in {root / args.experiment}, starting anew")
    return found[-1] if found else None


def _folder(args: Namespace, resume: Path | None) -> Path:
    if resume and not args.experiment and (resume.parent / "args.yaml").exists():
        return resume.parent
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(args.output or OUTPUT) / (args.experiment or f"{stamp}-{safe_model_name(args.model)}-{args.loss}")
