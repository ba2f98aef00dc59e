"""Train a classifier from a configuration: build the parts of the run, print a plan, and train all epochs."""

import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml
from timm import utils
from timm.models import safe_model_name
from torch import nn

from topk_registry.data.folders import listed
from topk_registry.errors import TrainError
from topk_registry.nn.classifier import num_classes_of
from topk_registry.ops.backend import BackendWarning
from topk_registry.train import checkpoint, data, model
from topk_registry.train.checkpoint import LAST, OUTPUT, Saver
from topk_registry.train.config import MULTILABEL, OWN_BATCHES, WEIGHT_METHODS, TrainConfig, flag_of
from topk_registry.train.data import Data, TrainLoader
from topk_registry.train.evaluation import readable
from topk_registry.train.loop import run_epochs
from topk_registry.train.loss import (
    Facts,
    LossSpec,
    build_loss,
    class_weights,
    over_ranks,
    set_epoch,
    takes_mixtures,
    try_loss,
)
from topk_registry.train.model import Compute
from topk_registry.train.plan import plan
from topk_registry.train.report import Report
from topk_registry.train.run import Progress, Row, Run, write_text

# settings without effect on the batches of the user's own loader, with their defaults
OF_OUR_LOADERS = {
    "sampler": "",
    "dataset_opt": {},
    "aa": None,
    "reprob": 0.0,
    "multi_crop": 0,
    "val_split": "validation",
}


@dataclass(frozen=True)
class TrainResult:
    """Result of a finished run.

    Args:
        metrics: metrics of the best epoch, such as ``train_loss`` and ``eval_top1``. The setting ``eval_metric``
            selects the best epoch.
        history: metrics of each epoch.
        folder: folder with checkpoints, ``summary.csv``, ``args.yaml``, ``classes.txt`` and ``curves.svg``.
        model: the trained model, with the weights of the last epoch.
    """

    metrics: Row
    history: list[Row]
    folder: Path | None
    model: nn.Module


class Trainer:
    """Train a classifier from a configuration.

    Args:
        config: settings of the run. Default: train on a built-in data set.
        model: model to train instead of the timm model in ``config``.
        train_loader: iterable over training batches (images, labels), instead of the data set in ``config``. With a
            loader, settings that ``config`` does not set have the defaults of timm.
        eval_loader: iterable over evaluation batches (images, labels), only together with a ``train_loader``.
        on_step: function that is called after each batch with the run and the loss, a tensor on the device.
        on_epoch: function that is called after each epoch with the run and the dictionary of metrics of the epoch.
        quiet: print nothing and draw no curves.

    Example:
        >>> from topk_registry.train import Trainer, TrainConfig
        >>> result = Trainer(TrainConfig(loss="focal", epochs=2)).fit()  # doctest: +SKIP
        >>> result.metrics["eval_top5"], result.folder  # doctest: +SKIP
    """

    def __init__(
        self,
        config: TrainConfig | None = None,
        *,
        model: nn.Module | None = None,
        train_loader: Iterable[Any] | None = None,
        eval_loader: Iterable[Any] | None = None,
        on_step: Callable[..., object] | None = None,
        on_epoch: Callable[..., object] | None = None,
        quiet: bool = False,
    ) -> None:
        self.config = TrainConfig() if config is None else config
        if eval_loader is not None and train_loader is None:
            raise TrainError("an eval_loader needs a train_loader")
        for name, loader in {"train_loader": train_loader, "eval_loader": eval_loader}.items():
            with suppress(TypeError):  # a generator has no length
                if loader is None or len(loader):  # pyright: ignore[reportArgumentType]
                    continue
            raise TrainError(f"{name} must have a length of at least 1, such as a DataLoader or a list of batches")
        own_data = None
        if train_loader is not None:
            self.config, own_data = _for_own_batches(self.config, train_loader), Data(train_loader, eval_loader)
        if model is not None:
            self.config = self.config.replace(model=type(model).__name__)
        self._build = partial(
            build, own_model=model, own_data=own_data, on_step=on_step, on_epoch=on_epoch, quiet=quiet
        )

    @cached_property
    def run(self) -> Run:
        """Parts and state of the run. The first access calls :func:`build`, which may raise a TrainError."""
        return self._build(self.config)

    def fit(self) -> TrainResult:
        """Train to the last epoch, or until ``early_stop`` ends the run.

        Raises:
            Interrupted: a signal, such as SIGINT from Ctrl-C, arrived. The message has the command that continues the
                run.
            TrainError: the run cannot start or continue.
        """
        run = self.run
        with run.report.closing, opened_folder(run) as saver, run.stop:
            run_epochs(run, saver)
        run.report.finish(run)
        return TrainResult(run.progress.best_row, run.progress.history, run.folder, run.model)

    def dry_run(self) -> None:
        """Run one batch forward and backward, and print the loss. No file is written."""
        run = self.run
        set_epoch(run.task.criterion, run.progress.epoch)
        run.loader.set_epoch(run.progress.epoch)
        images, target = next(readable(run.loader))
        run.model.train()
        with run.compute.autocast():
            loss = run.task(images, target)["loss"]
        loss.backward()
        shape = list(target.labels.shape if hasattr(target, "labels") else target.shape)
        run.report.say(f"dry run   images {list(images.shape)}, targets {shape}: loss {loss.item():.4f}")


def _for_own_batches(config: TrainConfig, loader: Any) -> TrainConfig:
    """Return the settings for a user's own training loader. Raise a TrainError for settings without effect on it."""
    changed: dict[str, Any] = {}
    if not (config.asks("dataset") or config.asks("data_dir")):
        changed["dataset"] = OWN_BATCHES
    if isinstance(size := getattr(loader, "batch_size", None), int) and not config.asks("batch_size"):
        changed["batch_size"] = size
    config = config.replace(**changed)
    if config.mixes:
        raise TrainError("mixup and cutmix do not apply to your own batches: mix in the loader, and unset them")
    if unused := [name for name, usual in OF_OUR_LOADERS.items() if getattr(config, name) != usual]:
        flags = ", ".join(f"{name} ({flag_of(name)})" for name in unused)
        raise TrainError(f"{flags}: without effect on your own batches; do this in the loader, and unset them")
    return config


def build(
    config: TrainConfig, own_model: Any = None, own_data: Data | None = None, *, quiet: bool = False, **hooks: Any
) -> Run:
    """Build a run and print its plan, or raise a TrainError. If ``resume`` is set, load the checkpoint. Write no file.

    ``own_model`` and ``own_data`` are the parts that the user passed to :class:`Trainer`. ``hooks`` are ``on_step`` and
    ``on_epoch``.
    """
    multilabel = config.task == MULTILABEL
    checkpoint.check_folder(config)
    for name in config.log:
        if find_spec(name) is None:
            raise TrainError(f"--log {name} needs a package: pip install {name}")
    if own_model is None:
        model.check_model(config.model)
    compute = Compute.set_up(config)
    report = Report(primary=compute.primary, quiet=quiet)
    resumed, note = checkpoint.shared(lambda: checkpoint.resume_path(config))
    saved = checkpoint.settings_in(resumed) if resumed else {}
    spec = LossSpec.resolve(config.loss, config.loss_opt, multilabel, saved)
    needs_counts = spec.needs_class_counts or config.class_weight in WEIGHT_METHODS
    opened = own_data or data.open_data(config, channels=config.channels, needs_counts=needs_counts)
    for line in opened.notes:  # printed before other checks, because skipped files may explain a later error
        report.say(line)
    utils.random_seed(config.seed, compute.rank)  # before the model is created, as in timm's script
    network, n = _network(config, own_model, opened)
    reason = "set by --eval-metric" if config.asks("eval_metric") else "default of --task multilabel"
    metric, reason = (config.eval_metric, reason) if config.eval_metric else spec.metric(n)
    config = config.replace(num_classes=n, eval_metric=metric, **model.preprocessing_of(config, network))
    config = model.resolve_learning_rate(config, compute.world_size)
    if config.metric.startswith(("many", "medium", "few")) and opened.counts is None:
        raise TrainError(f"--eval-metric {config.eval_metric} needs class counts, which are unknown for this data")
    network = model.place_model(config, network, compute)
    facts = _facts(config, spec, opened, n)
    criterion = build_loss(spec, facts)
    report.say(f"trying loss {spec.name} on one batch; the first use compiles its kernels")
    mixtures, kernels = _try_loss(spec, criterion, facts, compute)
    if own_data is not None:
        loader = TrainLoader(own_data.train, compute.device, channels_last=config.channels_last)
        tests = own_data.validation
    else:
        loader = data.create_train_loader(config, opened.train, compute, mixtures=mixtures)
        held = opened.validation
        tests = None if held is None else data.create_eval_loader(config, held, compute)
    record = {**spec.record, "class_weight": facts.class_weight}
    about: dict[str, Any] = {"record": record, "multilabel": multilabel, "device": compute.device}
    task: Any = checkpoint.RunTask(network, over_ranks(criterion), **about)
    optimizer = model.create_optimizer(config, network, task.criterion)
    updates = -(-len(loader) // config.grad_accum_steps)
    scheduler, epochs = model.create_schedule(config, optimizer, updates)
    progress, notes = Progress(), [note]
    if config.model_ema:
        task.setup_ema(decay=config.model_ema_decay, use_warmup=config.model_ema_warmup)
    if resumed is not None:
        _check_same_run(config, opened.class_names, saved, resumed)
        parts: dict[str, Any] = {"optimizer": optimizer, "scaler": compute.scaler}
        parts |= {"rank": compute.rank, "world": compute.world_size}
        progress, notes = checkpoint.resume(task, resumed, saved, **parts)
        trained = progress.epoch + (progress.unevaluated is not None)
        if scheduler is not None and trained:
            scheduler.step_update(trained * updates)
            scheduler.step(progress.epoch)
    if config.torchcompile:
        try:
            task.compile(backend=config.torchcompile)
            task.compile_ema(backend=config.torchcompile)
        except RuntimeError as error:
            raise TrainError(f"--torchcompile {config.torchcompile}: {error}") from error
    if compute.distributed:
        task.prepare_distributed(device_ids=[compute.device] if compute.device.type == "cuda" else None)
    folder = checkpoint.shared(lambda: _folder(config, resumed))
    run = Run(
        config=config,
        compute=compute,
        data=opened,
        spec=spec,
        loader=loader,
        eval_loader=tests,
        task=task,
        optimizer=optimizer,
        scheduler=scheduler,
        num_epochs=epochs,
        updates_per_epoch=updates,
        report=report,
        folder=folder,
        resumed=resumed,
        own_parts=own_model is not None or own_data is not None,
        progress=progress,
        **hooks,
    )
    checkpoint.restore_generators(task, compute.rank, compute.world_size)
    report.say("\n".join(filter(None, [plan(run, reason, kernels), *notes])))
    return run


def _network(config: TrainConfig, own_model: Any, opened: Data) -> tuple[nn.Module, int]:
    """Return the model and the number of its outputs, one per class."""
    known, given = opened.num_classes, config.num_classes
    expected = given or known
    if known and given and given < known:
        raise TrainError(f"--num-classes {given}: {config.data_name} has {known} classes")
    if expected == 1 and config.task != MULTILABEL:
        raise TrainError(f"{config.data_name} has one class: expected a folder per class")
    if own_model is None and expected is None:
        raise TrainError(f"the number of classes of {config.data_name} is unknown: specify --num-classes")
    network = own_model if own_model is not None else model.build_model(config, expected)
    n = getattr(network, "num_classes", None) or expected or num_classes_of(network)
    if expected is not None and n != expected:
        raise TrainError(f"the model has {n} outputs, expected {expected}, one per class")
    if opened.counts is not None:
        opened.counts = [*opened.counts, *[0] * (n - len(opened.counts))]
    return network, n


def _facts(config: TrainConfig, spec: LossSpec, opened: Data, n: int) -> Facts:
    if spec.needs_class_counts and opened.counts is None:
        raise TrainError(f"loss {spec.name!r} needs class counts, which are unknown for this data set")
    return Facts(
        n,
        smoothing=0.0 if config.mixes else config.smoothing,
        soft_targets=config.mixes,
        total_epochs=config.epochs,
        class_counts=opened.counts if spec.needs_class_counts else None,
        num_samples=opened.num_samples,
        class_weight=class_weights(config.class_weight, opened.counts, n) if config.class_weight else None,
        multilabel=config.task == MULTILABEL,
        splits=config.aug_splits,
    )


def _try_loss(spec: LossSpec, criterion: nn.Module, facts: Facts, compute: Compute) -> tuple[bool, str]:
    """Try the loss on one batch, or raise a TrainError. The state of PyTorch's random generators does not change.

    Returns:
        Whether the loss accepts :class:`LabelMixture` targets, and why it has no compiled kernels ("" if it has).
    """
    device = compute.device if compute.device.type == "cuda" else None
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng([device] if device else []):
        warnings.simplefilter("always")
        try_loss(spec, criterion, facts, device)
        mixtures = takes_mixtures(criterion, facts)
    kernels = ""
    for each in caught:
        if issubclass(each.category, BackendWarning):
            kernels = kernels or str(each.message)
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return mixtures, kernels


@contextmanager
def opened_folder(run: Run) -> Iterator[Saver | None]:
    """Context manager for the folder of a run, which creates ``args.yaml`` and ``classes.txt``.

    The first process gets the object that writes checkpoints, and other processes get None. If another run uses the
    folder, raise a TrainError.
    """
    config, folder, progress = run.config, run.folder, run.progress
    same_folder = run.resumed is None or run.resumed.parent.resolve() == folder.resolve()
    ranked = progress.rank(run.metric, same_folder=same_folder)
    if not run.compute.primary:
        yield None
        return
    # args.yaml names this folder, so that a run with these settings can resume
    place = {"output": str(folder.parent), "experiment": folder.name, "overwrite": False, "resume": ""}
    settings = {**config.to_dict(), **place, "loss_record": run.task.loss_record}
    names = run.data.class_names
    with checkpoint.occupied(folder):
        for path in checkpoint.results(folder) if config.overwrite else []:
            path.unlink()
        write_text(folder / "args.yaml", yaml.safe_dump(settings, default_flow_style=False))
        if names:
            write_text(folder / "classes.txt", "".join(f"{name}\n" for name in names))
        else:
            (folder / "classes.txt").unlink(missing_ok=True)  # of a run that this run overwrites
        saver = Saver(
            model=run.model,
            optimizer=run.optimizer,
            args=Namespace(**settings, class_names=names),
            amp_scaler=run.compute.scaler,
            checkpoint_dir=str(folder),
            recovery_dir=str(folder),
            decreasing=run.decreasing,
            max_history=config.checkpoint_hist,
            task=run.task,
        )
        if ranked and progress.epoch and (folder / LAST).exists():
            saver.load_state_dict_from_checkpoint(str(folder / LAST))
        run.report.open_loggers(run, settings)
        yield saver


def _folder(config: TrainConfig, resumed: Path | None) -> Path:
    if named := checkpoint.folder_of(config):
        return named
    if resumed is not None and (resumed.parent / "args.yaml").exists():
        return resumed.parent
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(config.output or OUTPUT, f"{stamp}-{safe_model_name(config.model)}-{config.loss}")
    return next(each for i in count(1) if not (each := path.with_name(f"{path.name}{f'-{i}' * (i > 1)}")).exists())


def _check_same_run(config: TrainConfig, now: list[str] | None, saved: dict[str, Any], path: Path) -> None:
    if (opt := saved.get("opt", config.opt)) != config.opt:
        raise TrainError(f"cannot resume from {path}: it has optimizer {opt!r}, not --opt {config.opt}")
    before = saved.get("class_names")
    if before and now and before != now:
        gone, new = [name for name in before if name not in now], [name for name in now if name not in before]
        raise TrainError(
            f"cannot resume from {path}: its classes differ from the data; missing {listed(gone) or 'none'}, new "
            f"{listed(new) or 'none'}"
        )
