"""Open a run's folder, and go on from a checkpoint where one is asked for."""

import os
from argparse import Namespace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from timm.models import safe_model_name
from timm.task import load_task_ema_checkpoint, resume_task_checkpoint
from timm.utils.checkpoint_saver import load_checkpoint_metadata
from torch import distributed as dist
from torch.utils.serialization import config as serialization

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.engine.build import distribute
from topk_studies.old_trainer.engine.resume import OUTPUT, differences, find_auto, newest, results
from topk_studies.old_trainer.engine.run import Run
from topk_studies.old_trainer.engine.state import LAST, Checkpoints, NumberedSaver, restore, restore_buffers, same_loss
from topk_studies.old_trainer.folders.images import listed
from topk_studies.old_trainer.report.console import read_class_names
from topk_studies.old_trainer.report.loggers import LoggedRun, Loggers
from topk_studies.old_trainer.setup.datasets import file_digests

SETTLED = ("lr", "num_classes", "dist_bn")  # None in the flags, and a number in a checkpoint


def begin(run: Run) -> None:
    """Resume if asked, wrap the model, and open the run's folder; nothing is written before the resuming worked."""
    config = run.config
    paths: list[Path | None] = [None, None]
    if run.compute.primary:
        resume = _resume_path(run)
        paths = [_folder(config, resume), resume]
    if run.compute.distributed:
        dist.broadcast_object_list(paths, src=0)
    run.folder, resume = paths
    if config.model_ema:
        run.task.setup_ema(
            decay=config.model_ema_decay,
            use_warmup=config.model_ema_warmup,
            device=torch.device("cpu") if config.model_ema_force_cpu else None,
        )
    saver = _saver(run) if run.compute.primary else None
    whole = False
    if resume:
        whole = _resume(run, resume)
        if saver is not None and resume.parent == run.folder:
            saver.load_state_dict_from_checkpoint(str(resume))
            saver.curr_recovery_file = str(resume) if resume.name != LAST else ""  # to be deleted when its turn comes
    elif config.start_epoch:
        run.progress.epoch = config.start_epoch
        _place_schedule(run)
    if saver is not None:
        _open_folder(run)
        _open_loggers(run, goes_on=resume is not None and resume.parent == run.folder)
        run.checkpoints = Checkpoints(saver)
    distribute(run)
    if whole:
        restore_buffers(run.task, rank=run.compute.rank, world=run.compute.world_size)


def _open_folder(run: Run) -> None:
    assert run.folder is not None
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        for path in results(run.folder) if run.given.overwrite else []:
            path.unlink()
    except OSError as error:
        raise TrainError(f"cannot open the run's folder {run.folder}: {error}") from error
    run.report.folder = run.folder
    # who begins anew from these settings has to say that files may go
    run.report.arguments({**run.given.to_dict(), "overwrite": False, **_records(run)})
    run.report.class_names(run.data.class_names)


def _open_loggers(run: Run, *, goes_on: bool) -> None:
    assert run.folder is not None
    settings = {**run.config.to_dict(), **_records(run)}
    run.loggers = Loggers(run.folder, run.report.say)
    logged = LoggedRun(run.folder.name, run.folder, settings, run.updates)
    run.loggers.open(run.config, logged, run.progress.history, run.updates_per_epoch, goes_on=goes_on)


def _records(run: Run) -> dict[str, Any]:
    """Records of a run beside its settings: where its loss came from, and digests of the files that it read."""
    return {"loss_record": run.task.loss, **file_digests(run.given)}


def _saver(run: Run) -> NumberedSaver:
    return NumberedSaver(
        model=run.model,
        optimizer=run.task.saved_optimizer(run.optimizer),
        args=Namespace(**run.config.to_dict(), **_records(run)),
        amp_scaler=run.compute.scaler,
        checkpoint_dir=str(run.folder),
        recovery_dir=str(run.folder),
        decreasing=run.decreasing,
        max_history=run.config.checkpoint_hist,
        task=run.task,
    )


def _resume(run: Run, path: Path) -> bool:
    """Load a checkpoint; return whether the run goes on where it was saved, not from its weights alone."""
    config, saved = run.config, None
    _check_classes(run, path)
    try:
        saved = load_checkpoint_metadata(str(path))
        keep = not config.no_resume_opt and _optimizer_fits(run, saved)
        reading: Any = serialization
        with reading.patch({"load.mmap": config.class_parallel}):  # a process reads its rows of the classifier
            epoch = resume_task_checkpoint(
                run.task,
                str(path),
                optimizer=run.task.saved_optimizer(run.optimizer) if keep else None,
                loss_scaler=run.compute.scaler if keep else None,
                log_info=False,
            )
            if config.model_ema:
                load_task_ema_checkpoint(run.task, str(path))
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise TrainError(f"cannot resume from {path}: {_other_model(run, saved)}{error}") from error
    whole = keep and config.start_epoch is None and restore(
        run.task, run.progress, run.scheduler, rank=run.compute.rank, world=run.compute.world_size,
        update_steps=config.grad_accum_steps,
    )  # fmt: skip
    if not whole:
        run.progress.epoch = config.start_epoch if config.start_epoch is not None else epoch or 0
    _place_schedule(run)
    place = f"epoch {run.progress.epoch + 1}" + (f", batch {run.progress.step + 1}" if run.progress.step else "")
    run.report.say(f"resumed   {path} at {place}" + ("" if whole else " (weights only, as timm resumes)"))
    for note in _notes(run, saved):
        run.report.say(f"          {note}")
    return whole


def _check_classes(run: Run, path: Path) -> None:
    """Refuse data whose classes are not those of the run that is resumed: a folder more or less shifts labels."""
    before, now = read_class_names(path.parent), run.data.class_names
    if before and now and before != now:
        gone, new = [name for name in before if name not in now], [name for name in now if name not in before]
        raise TrainError(
            f"cannot resume from {path}: it was trained on other classes than those of the data; gone: "
            f"{listed(gone) or 'none'}, new: {listed(new) or 'none'}. --initial-checkpoint begins another run with its "
            "weights"
        )


def _other_model(run: Run, saved: Any) -> str:
    """Name the checkpoint's model where the run has another, for the start of an error message; else nothing."""
    old = _settings_of(saved)
    now = {"model": run.config.model, "num_classes": run.config.num_classes}
    differ = [f"{name.replace('_', ' ')} {old[name]}, not {now[name]}" for name in now
              if old.get(name) not in (None, now[name])]  # fmt: skip
    return f"it is of {' and '.join(differ)}. " if differ else ""


def _settings_of(saved: Any) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint, where it holds them."""
    args = saved.get("args") if isinstance(saved, dict) else None
    return vars(args) if isinstance(args, Namespace) else {}


def _optimizer_fits(run: Run, saved: Any) -> bool:
    """Whether the optimizer has the groups of the checkpoint's: a loss that learns brings one of its own."""
    groups = saved.get("optimizer", {}).get("param_groups") if isinstance(saved, dict) else None
    sizes = [[len(group["params"]) for group in each] for each in (groups or (), run.optimizer.param_groups)]
    return groups is None or sizes[0] == sizes[1]


def _notes(run: Run, saved: Any) -> list[str]:
    """Sentences on how this run differs from the one that wrote the checkpoint."""
    record, old = (run.task.loaded_state or {}).get("loss"), _settings_of(saved)
    notes = []
    if record and not same_loss(record, run.task.loss):
        names = [f"{each['name']!r} {each['options'] or ''}".rstrip() for each in (record, run.task.loss)]
        differ = f"loss {names[0]}, not {names[1]}" if names[0] != names[1] else "other class weights"
        notes.append(f"the checkpoint was trained with {differ}: the state of that loss is left")
        if not _optimizer_fits(run, saved):
            notes.append("the optimizer begins anew: it has other parameters with this loss")
    if old.get("epochs", run.config.epochs) != run.config.epochs:
        epochs = f"planned for {old['epochs']} epochs before, now for {run.config.epochs}"
        notes.append(f"{epochs}: the schedule follows, and goes on at lr {run.lr:.3g}")
    notes += _batch_note(run, old)
    given = run.given.to_dict() | file_digests(run.given)
    settled = {name: value for name, value in given.items() if value is not None and name not in SETTLED}
    differ = differences({name: value for name, value in old.items() if name not in ("loss", "loss_opt")}, settled)
    return notes + ([f"other settings than the checkpoint's: {'; '.join(differ)}"] if differ else [])


def _batch_note(run: Run, old: dict[str, Any]) -> list[str]:
    """Say that an update has another number of images than before, and which flags restore it."""
    config, world = run.config, len((run.task.loaded_state or {}).get("random", ()))
    if not world or not old.get("batch_size"):
        return []
    before = old["batch_size"] * world * max(1, old.get("grad_accum_steps") or 1)
    step = config.batch_size * run.compute.world_size
    now = step * config.grad_accum_steps
    if before == now:
        return []
    changed = f"an update has {now} images now, {before} before ({_processes(world)}, now {run.compute.world_size})"
    if run.given.lr is None and run.parts.optimizer is None:
        return [f"{changed}: the rate follows, lr {config.lr:g}"]
    images = run.compute.world_size * config.grad_accum_steps
    ways = [f"-b {before // images}"] * (before % images == 0)
    ways += [f"--grad-accum-steps {before // step}"] * (before % step == 0)
    set_them = f"for as many as before, {' or '.join(ways)}" if ways else "consider another --lr"
    return [f"{changed}, at the same lr {config.lr:g}: {set_them}"]


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"


def _place_schedule(run: Run) -> None:
    """Set the learning rate of the place that the run is at; a plateau's rate came with the optimizer."""
    progress, scheduler = run.progress, run.scheduler
    if scheduler is None or hasattr(scheduler, "lr_scheduler"):
        return
    if run.updates:
        scheduler.step_update(run.updates)
    if progress.epoch:
        scheduler.step(progress.epoch)


def _resume_path(run: Run) -> Path | None:
    config = run.config
    if config.resume == "auto":
        path, note = find_auto(run.given)
        if note:
            run.report.say(note)
        return path
    if config.resume and os.path.isdir(config.resume):
        found = newest(Path(config.resume))
        raise TrainError(
            f"--resume {config.resume} is a folder, "
            + (f"name the checkpoint in it: --resume {found}" if found else "and there is no checkpoint in it")
        )
    if config.resume and not os.path.isfile(config.resume):
        raise TrainError(f"--resume {config.resume}: there is no such checkpoint")
    return Path(config.resume) if config.resume else None


def _folder(config: TrainConfig, resume: Path | None) -> Path:
    if resume and not config.experiment and (resume.parent / "args.yaml").exists():
        return resume.parent
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    root, name = Path(config.output or OUTPUT), f"{stamp}-{safe_model_name(config.model)}-{config.loss}"
    if config.experiment:
        return root / config.experiment
    # two runs may begin in one second
    return next(
        path for path in chain([root / name], (root / f"{name}-{i}" for i in count(2))) if not os.path.exists(path)
    )
