"""Train a classifier from a configuration: build the parts of the run, print a plan, and train all epochs."""

import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from timm import utils
from timm.models import safe_model_name
from torch import distributed as dist
from torch import nn

from topk_registry.data.folders import listed
from topk_registry.errors import Interrupted, TrainError
from topk_registry.nn.classifier import num_classes_of
from topk_registry.ops.backend import BackendWarning
from topk_registry.train import checkpoint, data, model
from topk_registry.train.checkpoint import LAST, OUTPUT, Row, Saver
from topk_registry.train.config import BUILTIN_DEFAULTS, CROSS_ENTROPY, MULTILABEL, WEIGHT_METHODS, TrainConfig, flag_of
from topk_registry.train.data import Data, TrainLoader
from topk_registry.train.evaluation import evaluate, readable
from topk_registry.train.loop import Run, train_epoch
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
from topk_registry.train.report import Report, against_cross_entropy, best_row, check_loggers, label, number

# settings without effect on the batches of the user's own loader, with their defaults
OF_OUR_LOADERS = {"sampler": "", "dataset_opt": {}, "aa": None, "reprob": 0.0, "val_split": "validation"}


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
        own: dict[str, Any] = {"train_loader": train_loader, "eval_loader": eval_loader}
        for name, loader in own.items():
            with suppress(TypeError):  # a generator has no length
                if loader is None or len(loader):
                    continue
            raise TrainError(f"{name} must have a length of at least 1, such as a DataLoader or a list of batches")
        if train_loader is not None:
            size = getattr(train_loader, "batch_size", None)
            self.config = self.config.for_own_batches(size if isinstance(size, int) else None)
            if self.config.mixes:
                raise TrainError("mixup and cutmix do not apply to your own batches: mix in the loader, and unset them")
            unused = [name for name, usual in OF_OUR_LOADERS.items() if getattr(self.config, name) != usual]
            if unused:
                flags = ", ".join(f"{name} ({flag_of(name)})" for name in unused)
                raise TrainError(f"{flags}: without effect on your own batches; do this in the loader, and unset them")
        if model is not None:
            self.config = self.config.replace(model=type(model).__name__)
        self._parts = (model, train_loader, eval_loader)
        self._hooks, self._report, self._run = (on_step, on_epoch), Report(quiet=quiet), None

    @property
    def run(self) -> Run:
        """Parts and state of the run. The first access calls :func:`build`, which may raise a TrainError."""
        if self._run is None:
            checkpoint.check_folder(self.config)
            self._run = build(self.config, *self._parts, self._report)
            self._run.on_step, self._run.on_epoch = self._hooks
        return self._run

    def fit(self) -> TrainResult:
        """Train to the last epoch, or until ``early_stop`` ends the run.

        Raises:
            Interrupted: a signal, such as SIGINT from Ctrl-C, arrived. The message has the command that continues the
                run.
            TrainError: the run cannot start or continue.
        """
        run = self.run
        with ExitStack() as stack:
            stack.callback(run.report.close)
            open_folder(run, stack)
            with run.stop:
                run_epochs(run)
        run.report.finish(run.progress)
        return TrainResult(best_row(run.progress), run.progress.history, run.folder, run.model)

    def dry_run(self) -> None:
        """Run one batch forward and backward, and print the loss. No file is written."""
        run = self.run
        set_epoch(run.criterion, run.progress.epoch)
        run.loader.set_epoch(run.progress.epoch)
        images, target = next(readable(run.loader))
        run.model.train()
        with run.compute.autocast():
            loss = run.task(images, target)["loss"]
        loss.backward()
        shape = list(target.labels.shape if hasattr(target, "labels") else target.shape)
        run.report.say(f"dry run   images {list(images.shape)}, targets {shape}: loss {loss.item():.4f}")


def build(config: TrainConfig, own_model: Any, train_loader: Any, eval_loader: Any, report: Report) -> Run:
    """Build all parts of a run, or raise a TrainError. If ``resume`` is set, load the checkpoint. Write no file.

    ``own_model`` and the loaders are the parts that the user passed to :class:`Trainer`, or None.
    """
    multilabel = config.task == MULTILABEL
    check_loggers(config.log)
    if own_model is None:
        model.check_model(config.model)
    compute = Compute.set_up(config)
    resume, note = checkpoint.shared(lambda: checkpoint.resume_path(config))
    spec = LossSpec.resolve(config.loss, config.loss_opt, multilabel, resume and checkpoint.settings_in(resume))
    report.primary = compute.primary
    weights_by_count = config.class_weight in WEIGHT_METHODS
    if train_loader is not None:
        opened = Data(train_loader, eval_loader)
    else:
        channels = model.channels_of(config)
        opened = data.open_data(config, channels=channels, needs_counts=spec.needs_class_counts or weights_by_count)
    for line in opened.notes:  # printed before other checks, because skipped files may explain a later error
        report.say(line)
    utils.random_seed(config.seed, compute.rank)  # before the model is created, as in timm's script
    classes = _classes(config, opened)
    if own_model is None and classes is None:
        raise TrainError(f"the number of classes of {data.name_of(config)} is unknown: specify --num-classes")
    network = own_model if own_model is not None else model.build_model(config, classes)
    n = _resolve_classes(config, network, opened)
    preprocessing = model.preprocessing_of(config, network)
    config = model.resolve_learning_rate(config.replace(num_classes=n, **preprocessing), compute.world_size)
    reason = "set by --eval-metric"
    if not config.eval_metric:
        metric, reason = spec.metric(n)
        config = config.replace(eval_metric=metric)
    _check_metric(config, opened)
    network = model.place_model(config, network, compute)
    weights = class_weights(config.class_weight, opened.counts, n) if config.class_weight else None
    facts = Facts(
        n,
        smoothing=0.0 if config.mixes else config.smoothing,
        soft_targets=config.mixes,
        total_epochs=config.epochs,
        class_counts=opened.counts if spec.needs_class_counts else None,
        num_samples=opened.num_samples,
        class_weight=weights,
        multilabel=multilabel,
        splits=config.aug_splits,
    )
    if spec.needs_class_counts and opened.counts is None:
        raise TrainError(f"loss {spec.name!r} needs class counts, which are unknown for this data set")
    criterion = build_loss(spec, facts)
    report.say(f"trying loss {spec.name} on one batch; the first use compiles its kernels")
    states = checkpoint.generator_states()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try_loss(spec, criterion, facts, compute.device if compute.device.type == "cuda" else None)
        mixtures = takes_mixtures(criterion, facts)
    checkpoint.set_generator_states(states)
    for each in caught:
        if not issubclass(each.category, BackendWarning):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    criterion = over_ranks(criterion)
    if train_loader is not None:
        loader, tests = TrainLoader(train_loader, compute.device, compute.dtype), eval_loader
    else:
        loader = data.create_train_loader(config, opened.train, preprocessing, compute, mixtures=mixtures)
        held = opened.validation
        tests = None if held is None else data.create_eval_loader(config, held, preprocessing, compute)
    record = spec.record | ({"class_weight": weights} if weights else {})
    about = {"device": compute.device, "dtype": compute.dtype}
    task = checkpoint.create_task(network, criterion, multilabel=multilabel, record=record, **about)
    optimizer = model.create_optimizer(config, network, task.criterion)
    run = Run(
        config, compute, opened, spec, task.criterion, loader, tests, task, optimizer, None, 0, report, preprocessing,
        own_parts=own_model is not None or train_loader is not None, reason=reason, resumed=resume,
        kernels=[str(each.message) for each in caught if issubclass(each.category, BackendWarning)],
    )  # fmt: skip
    run.scheduler, run.num_epochs = model.create_schedule(config, optimizer, run.updates_per_epoch, run.decreasing)
    report.metric, report.epochs = run.metric, run.num_epochs
    report.title = f"{config.loss} on {data.name_of(config)}, {config.model}"
    report.say(plan(run, "writes nothing" if config.dry_run else f"writes {_folder(run)}"))
    if note:
        report.say(note)
    _resume_and_wrap(run, resume)
    return run


def _resume_and_wrap(run: Run, resume: Path | None) -> None:
    """Load the checkpoint, then compile the model and wrap it in DistributedDataParallel, as timm's script does."""
    config, task, compute = run.config, run.task, run.compute
    if config.model_ema:
        task.setup_ema(decay=config.model_ema_decay, use_warmup=config.model_ema_warmup)
    if resume is not None:
        _check_same_run(run, resume)
        parts: dict[str, Any] = {"optimizer": run.optimizer, "scaler": compute.scaler, "scheduler": run.scheduler}
        notes = checkpoint.resume(task, resume, run.progress, **parts, rank=compute.rank, world=compute.world_size)
        run.report.say("\n".join(notes))
        if run.scheduler is not None and run.progress.epoch and not hasattr(run.scheduler, "lr_scheduler"):
            run.scheduler.step_update(run.progress.epoch * run.updates_per_epoch)
            run.scheduler.step(run.progress.epoch)
    if config.torchcompile:
        task.compile(backend=config.torchcompile)
        if config.model_ema:
            task.compile_ema(backend=config.torchcompile)
    if compute.distributed:
        run.control = dist.new_group(backend="gloo")
        task.prepare_distributed(device_ids=[compute.device] if compute.device.type == "cuda" else None)
    checkpoint.restore_generators(task, compute.rank, compute.world_size)


def open_folder(run: Run, stack: ExitStack) -> None:
    """Create the folder of the run with ``args.yaml`` and ``classes.txt``. Only the first process writes files.

    No other run may use the folder until ``stack`` is closed. If another run uses it, raise a TrainError.
    """
    config = run.config
    names: list[Any] = [_folder(run)] if run.compute.primary else [None]
    if run.compute.distributed:
        dist.broadcast_object_list(names, src=0)
    folder = run.folder = names[0]
    assert folder is not None
    progress, source = run.progress, Path(config.resume).parent if config.resume not in ("", "auto") else folder
    continues = progress.metric in ("", run.metric) and source.resolve() == folder.resolve()
    if not continues:  # the best epoch was best by another metric, or its checkpoint is in another folder
        progress.best, progress.best_epoch, progress.stale = None, None, 0
    progress.metric = run.metric
    if not run.compute.primary:
        return
    run.report.folder = folder
    # args.yaml names this folder, so that a run with these settings can resume
    run.config = config = config.replace(output=str(folder.parent), experiment=folder.name)
    settings = {**config.to_dict(), "overwrite": False, "resume": "", "loss_record": run.task.loss_record}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(checkpoint.occupied(folder))
        for path in checkpoint.results(folder) if config.overwrite else []:
            path.unlink()
    except OSError as error:
        raise TrainError(f"cannot open the folder {folder}: {error}") from error
    checkpoint.write_text(folder / "args.yaml", yaml.safe_dump(settings, default_flow_style=False))
    if run.data.class_names:
        checkpoint.write_text(folder / "classes.txt", "".join(f"{name}\n" for name in run.data.class_names))
    run.saver = Saver(
        model=run.model,
        optimizer=run.optimizer,
        args=Namespace(**settings, class_names=run.data.class_names),
        amp_scaler=run.compute.scaler,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
        decreasing=run.decreasing,
        max_history=config.checkpoint_hist,
        task=run.task,
    )
    if continues and progress.epoch and (folder / LAST).exists():
        run.saver.load_state_dict_from_checkpoint(str(folder / LAST))
    run.report.open_loggers(config.log, settings, run.progress.epoch * run.updates_per_epoch)


def run_epochs(run: Run) -> None:
    """Train to the last epoch, or until ``--early-stop`` ends the run. After a signal, raise :class:`Interrupted`."""
    progress, config = run.progress, run.config
    while progress.epoch < run.num_epochs:
        clock, epoch = time.perf_counter(), progress.epoch
        set_epoch(run.criterion, epoch)
        if progress.unevaluated is None:
            progress.unevaluated = train_epoch(run, epoch)
        else:
            run.report.begin_epoch(epoch, run.updates_per_epoch)
        if progress.unevaluated is None:
            raise _interrupted(run)
        checkpoint.snapshot(run.task, progress, run.scheduler)  # the evaluation draws random numbers
        row = measure(run, progress.unevaluated)
        if row is None:
            if run.saver is not None:
                run.saver.save_last(epoch)
            raise _interrupted(run)
        value = row.get(run.metric)
        progress.close(row, value, run.decreasing)
        plateau = hasattr(run.scheduler, "lr_scheduler")
        if run.scheduler is not None and not (plateau and value is None and epoch >= run.scheduler.warmup_t):
            run.scheduler.step(epoch + 1, value)
        checkpoint.snapshot(run.task, progress, run.scheduler)
        if run.saver is not None:
            run.saver.save(epoch, value)
        if run.compute.primary:
            run.report.epoch_done(row, progress.history, time.perf_counter() - clock)
        if run.on_epoch is not None:
            run.on_epoch(run, row)
        if config.early_stop and progress.stale >= config.early_stop:
            run.report.say(f"stopped early: no better {run.metric} in {progress.stale} evaluations")
            return
        if run.should_stop() and progress.epoch < run.num_epochs:
            raise _interrupted(run)


def measure(run: Run, loss: float) -> Row | None:
    """Evaluate the model after an epoch, and the EMA weights if the run has them. Return the metrics by name.

    The result also has the learning rate and ``loss``, the training loss. Without evaluation data, or if the setting
    ``val_interval`` skips this epoch, nothing is evaluated. If a signal stops the evaluation, return None.
    """
    config, compute, epoch = run.config, run.compute, run.progress.epoch
    row: Row = {"epoch": epoch + 1, "train_loss": loss, "lr": run.lr}
    shares = compute.distributed and config.dist_bn and not config.sync_bn
    if shares:
        utils.distribute_bn(run.model, compute.world_size, config.dist_bn == "reduce")
    due = (epoch + 1) % config.val_interval == 0 or epoch + 1 == run.num_epochs
    if run.eval_loader is None or not due:
        return row
    for prefix, ema in (("eval_", False), ("ema_", True))[: 1 + config.model_ema]:
        if ema and shares:
            utils.distribute_bn(run.task.get_trainable_module(ema=True), compute.world_size, config.dist_bn == "reduce")
        metrics = measure_weights(run, ema)
        if metrics is None:
            return None
        row |= {prefix + name: value for name, value in metrics.items()}
    return row


def measure_weights(run: Run, ema: bool) -> dict[str, float] | None:
    """Return the metrics of the EMA weights with ``ema``, else of the model. After a signal to stop, return None."""
    config, batches = run.config, len(run.eval_loader)

    def progress(batch: int) -> bool:
        run.report.testing("Test (EMA)" if ema else "Test", batch, batches, config.log_interval)
        return run.control is None and bool(run.stop)  # with several processes, a signal does not stop the evaluation

    return evaluate(
        run.task.get_eval_model(ema=ema),
        run.eval_loader,
        progress=progress,
        **evaluation_options(config, run.compute, run.criterion, run.data.counts),
    )


def evaluation_options(config: TrainConfig, compute: Compute, criterion: object, counts: Any) -> dict[str, Any]:
    """Return arguments for :func:`evaluate`. ``counts``: number of training images per class, or None."""
    metric = config.metric
    size = "".join(letter for letter in metric.partition("top")[2] if letter.isdecimal())
    temperature = config.marginal_temperature or getattr(criterion, "marginal_temperature", None) or 1.0
    shots = counts is not None and len({(c > 100) + (c >= 20) for c in counts}) > 1
    return {
        "num_classes": config.num_classes or 0,
        "k": sorted({1, 5, *([int(size)] if size else [])}),
        "device": compute.device,
        "dtype": compute.dtype,
        "autocast": compute.autocast,
        "predictive_logits": getattr(criterion, "predictive_logits", None),
        "class_counts": counts if shots or metric.startswith(("many", "medium", "few")) else None,
        "crops": config.multi_crop,
        "temperature": temperature,
        "multilabel": config.task == MULTILABEL,
        "channels_last": config.channels_last,
    }


def train(config: TrainConfig) -> int:
    """Run ``timm train`` and return the exit status.

    The status is 0 for success, 1 if the run failed, 2 if the run could not start, and 128 + N after signal N.
    """
    trainer = Trainer(config)
    try:
        if config.dry_run:
            trainer.dry_run()
            return 0
        run = trainer.run
    except TrainError as error:
        return _fail(f"{error}", 2)
    except KeyboardInterrupt:
        return _fail("stopped before training began", 130)
    try:
        result = trainer.fit()
        if on_builtin_data(config) and config.loss not in CROSS_ENTROPY and not run.compute.distributed:
            compare_with_cross_entropy(config, run, result)
    except Interrupted as error:
        return _fail(f"{error}" if run.compute.primary else "", 128 + error.signum)
    except TrainError as error:
        return _fail(f"{error}", 1)
    finally:
        with suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
    return 0


def on_builtin_data(config: TrainConfig) -> bool:
    return config.dataset == BUILTIN_DEFAULTS["dataset"] and not config.asks("dataset")


def compare_with_cross_entropy(config: TrainConfig, run: Run, result: TrainResult) -> None:
    """Train again with cross-entropy and otherwise equal settings, and print the metrics of both losses."""
    report, metric = run.report, run.metric
    report.say("\nthe same training with cross-entropy, for comparison:")
    own: dict[str, Any] = {
        "loss": "ce",
        "loss_opt": {},
        "smoothing": config.smoothing,
        "eval_metric": run.config.eval_metric,
    }
    own |= {"output": str(result.folder), "experiment": "cross_entropy", "overwrite": True, "resume": "", "log": []}

    def show(other: Run, row: Row) -> None:
        shown = f"{label(metric)} {number(metric, row[metric])}" if metric in row else ""
        report.say(f"Epoch {row['epoch']:g}/{other.num_epochs}: train loss {row['train_loss']:.4f}  {shown}")

    other = Trainer(config.replace(**own), on_epoch=show, quiet=True).fit()
    images = len(run.data.validation) if run.data.validation is not None else 0
    if images:
        report.say("\n" + against_cross_entropy(config.loss, result.metrics, other.metrics, metric, images))


def _fail(message: str, status: int) -> int:
    if message:
        print(f"timm train: {message}", file=sys.stderr)
    return status


def _interrupted(run: Run) -> Interrupted:
    error = Interrupted(run.stop.signum or 15)
    progress = run.progress
    kept = f"epoch {progress.epoch} is saved" if progress.epoch else "no epoch is complete"
    if progress.unevaluated is not None:
        kept = f"epoch {progress.epoch + 1} is trained and saved, without its evaluation"
    if run.folder is not None and not run.own_parts:
        kept += f"; continue with\n  {checkpoint.continue_command(run.folder)}"
    error.args = (f"stopped by signal {error.signum}: {kept}",)
    return error


def _folder(run: Run) -> Path:
    config = run.config
    if config.experiment:
        return Path(config.output or OUTPUT, config.experiment)
    if config.resume and config.resume != "auto" and (Path(config.resume).parent / "args.yaml").exists():
        return Path(config.resume).parent
    if config.resume == "auto" and run.resumed is not None:
        return run.resumed.parent
    path = Path(config.output or OUTPUT, f"{run.stamp}-{safe_model_name(config.model)}-{config.loss}")
    return next(each for i in count(1) if not (each := path.with_name(f"{path.name}{f'-{i}' * (i > 1)}")).exists())


def _classes(config: TrainConfig, opened: Data) -> int | None:
    known, given = opened.num_classes, config.num_classes
    if known and given and given < known:
        raise TrainError(f"--num-classes {given}: {data.name_of(config)} has {known} classes")
    if (given or known) == 1 and config.task != MULTILABEL:
        raise TrainError(f"{data.name_of(config)} has one class: expected a folder per class")
    return given or known


def _resolve_classes(config: TrainConfig, network: Any, opened: Data) -> int:
    expected = _classes(config, opened)
    try:
        n = getattr(network, "num_classes", None) or num_classes_of(network)
    except ValueError:  # a model of the caller with an unknown classifier
        if expected is None:
            raise
        n = expected
    if expected is not None and n != expected:
        raise TrainError(f"the model has {n} outputs, expected {expected}, one per class")
    if opened.counts is not None:
        opened.counts = [*opened.counts, *[0] * (n - len(opened.counts))]
    return n


def _check_metric(config: TrainConfig, opened: Data) -> None:
    if config.metric.startswith(("many", "medium", "few")) and opened.counts is None:
        raise TrainError(f"--eval-metric {config.eval_metric} needs class counts, which are unknown for this data")


def _check_same_run(run: Run, path: Path) -> None:
    saved = checkpoint.settings_in(path)
    if (opt := saved.get("opt", run.config.opt)) != run.config.opt:
        raise TrainError(f"cannot resume from {path}: it has optimizer {opt!r}, not --opt {run.config.opt}")
    before, now = saved.get("class_names"), run.data.class_names
    if before and now and before != now:
        gone, new = [name for name in before if name not in now], [name for name in now if name not in before]
        raise TrainError(
            f"cannot resume from {path}: its classes differ from the data; missing {listed(gone) or 'none'}, new "
            f"{listed(new) or 'none'}"
        )
