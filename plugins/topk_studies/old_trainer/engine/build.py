"""Build the parts of a run from its configuration."""

import time
from collections.abc import Sequence
from typing import Any, cast

from timm.data import resolve_data_config
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry.data.labels import class_names_of, kept_labels_of
from topk_registry.losses.base import ClassificationLoss
from topk_registry.losses.batch import BatchLoss
from topk_registry.losses.ranks import mean_over_ranks
from topk_registry.nn.classifier import num_classes_of
from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig, spelt
from topk_studies.old_trainer.config.metric_names import LOSSES, metric_sizes, parse_metric
from topk_studies.old_trainer.config.tasks import CLASSIFICATION, MULTILABEL
from topk_studies.old_trainer.config.weights import FLAGS
from topk_studies.old_trainer.engine.evaluate import Crops, Evaluator, LabelSetEvaluator, temperature_of
from topk_studies.old_trainer.engine.resume import recorded_loss
from topk_studies.old_trainer.engine.run import Hooks, Run
from topk_studies.old_trainer.engine.state import RegistryTask, all_ranks
from topk_studies.old_trainer.folders.images import count_of, listed
from topk_studies.old_trainer.report.console import Report
from topk_studies.old_trainer.report.loggers import check_loggers
from topk_studies.old_trainer.report.progress import Progress
from topk_studies.old_trainer.setup.class_weights import ClassWeights, same_in_all, stats_of, told
from topk_studies.old_trainer.setup.compute import Compute, check_backend
from topk_studies.old_trainer.setup.datasets import Data, counts_of, name_of, open_data
from topk_studies.old_trainer.setup.heads import freeze_features
from topk_studies.old_trainer.setup.label_sets import positives_of
from topk_studies.old_trainer.setup.loaders import TrainLoader, create_eval_loader, create_train_loader
from topk_studies.old_trainer.setup.loss import Context, LossSpec
from topk_studies.old_trainer.setup.models import build_model, channels_of, place_model
from topk_studies.old_trainer.setup.optimization import create_optimizer, create_schedule, settle_rate
from topk_studies.old_trainer.setup.parts import Parts
from topk_studies.old_trainer.setup.preflight import check
from topk_studies.old_trainer.setup.rehearsal import Rehearsal
from topk_studies.old_trainer.setup.sampler import told_draw

SHOTS = ("many", "medium", "few")


COLD = (
    "compiled kernels are not there yet: the loss runs in torch operations, which takes it longer; "
    "`topk-registry doctor --warm` compiles them, once"
)


def build(
    given: TrainConfig,
    parts: Parts,
    hooks: Hooks,
    *,
    quiet: bool = False,
    began: float | None = None,
    compiles: bool = True,
) -> Run:
    """Build the run; its folder is opened later, and not in a dry run.

    ``began`` is the reading of ``time.perf_counter`` that the run's time counts from; by default now. ``compiles`` says
    whether it may wait for kernels to be compiled.

    Raises:
        TrainError: it cannot work.
    """
    began = time.perf_counter() if began is None else began
    loss = LossSpec.resolve(given.loss, given.loss_opt, recorded_loss(given), task=given.task)
    check_loggers(given)
    if given.torchcompile:
        check_backend(given.torchcompile)
    rehearsal, notes = check(given, loss, parts, compiles=compiles)
    if loss.kept:
        kept = " ".join(f"{option}={value}" for option, value in loss.kept.items())
        notes = [*notes, f"loss {loss.name!r} keeps {kept}, its default when the run began"]
    compute = Compute.set_up(given)
    config = given.replace(eval_metric=parse_metric(given.eval_metric, given.task))
    asked = [each for setting in FLAGS if (each := ClassWeights.of(config, setting)) is not None]
    needs = [f"loss {config.loss!r}"] * loss.needs_class_counts + [each.flag for each in asked if each.needs_counts]
    data = _data(config, parts, counts_for=needs[0] if needs and not config.class_stats else "")
    model = parts.model if parts.model is not None else build_model(config, classes_of(config, data))
    config = settle_classes(config, model, data)
    data_config = resolve_data_config(config.to_dict(), model=model, verbose=False)
    if config.retrain_head:
        notes = [*notes, freeze_features(config, model, own=parts.model is not None)]
        config = config.replace(dist_bn="")  # frozen statistics are the same in all processes
    _fit_classes(data, config.num_classes or 0)
    if config.task != MULTILABEL:
        _check_metric(config.eval_metric, data.counts, config.num_classes or 0)
    record, weights = loss.record, {}
    counts, samples = data.counts, data.num_samples if config.task == MULTILABEL else None
    if config.class_stats:
        counts, samples = stats_of(config.class_stats, config.num_classes)
        notes = [*notes, f"class counts from {config.class_stats}: {samples} samples"]
    for each in asked:
        weights[each.kind] = same_in_all(each.values(counts, config.num_classes or 0, samples))
        record[each.kind] = list(weights[each.kind])
        notes = [*notes, told(weights[each.kind], each, data.class_names)]
    rehearsal = rehearsal.settled(
        Context.of(config, config.num_classes or 0, counts, **weights, num_samples=samples or data.num_samples)
    )
    backend = _backend(rehearsal, compute)
    notes = [*notes, COLD] if backend == "torch" else notes
    criterion, mixtures = rehearsal.criterion, rehearsal.takes_mixtures(linear=False)
    loader = _train_loader(config, parts, data, data_config, compute, mixtures)
    notes = [*notes, *told_draw(config, loader.draw, data.class_names)]
    model = place_model(config, model, compute)
    if compute.distributed and config.sync_bn:
        config = config.replace(dist_bn="")
    about: dict[str, Any] = {"loss": record, "device": compute.device, "dtype": compute.dtype, "verbose": False}
    task = RegistryTask(model, criterion, **about)
    task.backend = backend
    config = settle_rate(config, parts, compute.world_size)
    optimizer = parts.optimizer or create_optimizer(config, model, criterion)
    evaluator = _evaluator(config, parts, data, data_config, criterion, compute)
    decreasing = evaluator is None or config.eval_metric in LOSSES
    scheduler, epochs = create_schedule(config, optimizer, len(loader), decreasing=decreasing)
    _check_epochs(config, epochs)
    return Run(
        given=given,
        config=config,
        compute=compute,
        data=data,
        loss=loss,
        loader=loader,
        task=task,
        optimizer=optimizer,
        scheduler=scheduler,
        num_epochs=epochs,
        evaluator=evaluator,
        progress=Progress(steps_per_epoch=len(loader), batch=loader.images_of_step(compute.world_size)),
        report=Report(
            title=f"{config.loss} on {name_of(config)}, {config.model}",
            metric=f"eval_{config.eval_metric}" if evaluator is not None else "train_loss",
            epochs=epochs,
            began=began,
            primary=compute.primary,
            quiet=quiet,
        ),
        parts=parts,
        hooks=hooks,
        notes=notes,
    )


def _backend(rehearsal: Rehearsal, compute: Compute) -> str:
    """The backend of the run's operators: "torch" where a process would have to compile kernels for the CPU."""
    here = "auto" if compute.device.type == "cuda" else rehearsal.backend
    return "torch" if "torch" in all_ranks(here) else "auto"


def classes_of(config: TrainConfig, data: Data) -> int | None:
    """The number of classes: the data's, or more where the configuration says so; None leaves the model's.

    Raises:
        TrainError: the configuration says fewer than the data has.
    """
    known, wanted = data.num_classes, config.num_classes
    if known and wanted and wanted < known:
        raise TrainError(
            f"--num-classes {wanted}: {name_of(config)} has {count_of(range(known), 'class')}; leave it out"
        )
    if (wanted or known) == 1 and config.task == CLASSIFICATION:
        raise TrainError(
            f"{name_of(config)} has one class, of which nothing can be learned: expected a folder for each class"
        )
    return wanted or known


def create_evaluator(
    config: TrainConfig,
    data: Data,
    data_config: dict[str, Any],
    criterion: object,
    compute: Compute,
    *,
    sizes: Sequence[int] = (),
    loader: Any = None,
    model: nn.Module | None = None,
) -> Evaluator:
    """The evaluator on the data's evaluation split, or on a caller's loader; ``sizes`` are further k of top-k."""
    if loader is None:
        crops = Crops(data_config, config.multi_crop) if config.multi_crop else None
        loader = create_eval_loader(config, data.validation, data_config, compute, transform=crops, model=model)
    sizes = sorted({*metric_sizes(config.eval_metric), *sizes})
    if config.task == MULTILABEL:
        about: dict[str, Any] = {"channels_last": config.channels_last, "tta": config.tta}
        n, threshold = config.num_classes or 0, config.multilabel_threshold
        return LabelSetEvaluator(loader, compute, num_classes=n, sizes=sizes, threshold=threshold, **about)
    return Evaluator(
        loader,
        compute,
        num_classes=config.num_classes or 0,
        sizes=sizes,
        counts=data.counts if _has_shots(data.counts, config.eval_metric) else None,
        channels_last=config.channels_last,
        crops=config.multi_crop,
        tta=config.tta,
        temperature=temperature_of(config, criterion),
    )


def distribute(run: Run) -> None:
    """Compile, then wrap for several processes; after a checkpoint's weights are in."""
    config, task = run.config, run.task
    if config.torchcompile:
        task.compile(backend=config.torchcompile, mode=config.torchcompile_mode)
        if task.has_ema():
            task.compile_ema(backend=config.torchcompile, mode=config.torchcompile_mode)
    if run.compute.distributed:
        _share_loss_parameters(run)
        if task.weighs_rows:
            mean_over_ranks(cast(ClassificationLoss, task.criterion))
        if isinstance(task.criterion, BatchLoss):
            task.criterion.over_ranks()
        ids = None if run.compute.device.type == "cpu" else [run.compute.device]
        task.prepare_distributed(device_ids=ids, broadcast_buffers=not config.no_ddp_bb)


def _data(config: TrainConfig, parts: Parts, *, counts_for: str) -> Data:
    """The data of a run; ``counts_for`` names what needs the class counts, if anything does."""
    if parts.train_loader is None:
        return open_data(config, channels=channels_of(config), needs_counts=bool(counts_for))
    sets = [getattr(loader, "dataset", loader) for loader in (parts.train_loader, parts.eval_loader)]
    data = Data(sets[0], sets[1], class_names=class_names_of(sets[0]))
    names = class_names_of(sets[1])
    if data.class_names and names and names != data.class_names:
        raise TrainError(
            f"the eval_loader has other classes than the train_loader: {listed(names)}; expected "
            f"{listed(data.class_names)}"
        )
    if config.task == MULTILABEL:
        data.counts, data.notes = positives_of(sets[0], read=False)
    else:
        labels = kept_labels_of(sets[0])
        data.counts = None if labels is None else counts_of(config, data, labels)
    if counts_for and data.counts is None:
        raise TrainError(f"{counts_for} needs the class counts: the loader's data set must have `targets`")
    return data


def settle_classes(config: TrainConfig, model: nn.Module, data: Data) -> TrainConfig:
    """The configuration with the number of classes that the model predicts."""
    try:
        return config.replace(num_classes=config.num_classes or num_classes_of(model))
    except ValueError:  # a caller's own model, whose classifier is not found
        return config.replace(num_classes=classes_of(config, data))


def _train_loader(
    config: TrainConfig, parts: Parts, data: Data, data_config: dict[str, Any], compute: Compute, mixtures: bool
) -> TrainLoader:
    if parts.train_loader is not None:
        return TrainLoader(parts.train_loader, None, config.train_batches_per_epoch)
    return create_train_loader(config, data.train, data_config, compute, mixtures=mixtures)


def _evaluator(
    config: TrainConfig, parts: Parts, data: Data, data_config: dict[str, Any], criterion: nn.Module, compute: Compute
) -> Evaluator | None:
    own = parts.eval_loader if parts.train_loader is not None else None
    if own is None and (parts.train_loader is not None or data.validation is None):
        return None
    return create_evaluator(config, data, data_config, criterion, compute, loader=own)


def _fit_classes(data: Data, n: int) -> None:
    """Compare the number of the data's classes with that of the model."""
    known = data.num_classes
    if known is None:
        data.notes.append(f"the data does not tell its classes; the model predicts {n}: see --num-classes")
    elif known > n:
        raise TrainError(f"the data has {known} classes, the model predicts {n}: see --num-classes")
    elif known < n:
        data.notes.append(f"the model predicts {n} classes, the data has {known}: the others are never right")
    if data.counts is not None:
        names = data.class_names or [str(i) for i in range(known or n)]
        empty = [name for name, count in zip(names, data.counts, strict=False) if not count]
        if empty:
            data.notes.append(f"no training images of {count_of(empty, 'class')}: {listed(empty)}")
        data.counts += [0] * (n - len(data.counts))


def _share_loss_parameters(run: Run) -> None:
    """Keep a learning loss the same in every process; DDP synchronises the model's parameters only."""
    for parameter in run.task.criterion.parameters():
        dist.broadcast(parameter.data, src=0)
        if parameter.requires_grad:
            parameter.register_hook(_mean_over_ranks)


def _mean_over_ranks(gradient: Tensor) -> Tensor:
    gradient = gradient / dist.get_world_size()
    dist.all_reduce(gradient)
    return gradient


def _has_shots(counts: list[int] | None, metric: str) -> bool:
    """Whether classes are frequent and rare enough to be told apart, or a metric asks for it."""
    if counts is None:
        return False
    return len({_shots(count) for count in counts}) > 1 or metric.partition("_")[0] in SHOTS


def _shots(count: int) -> str:
    return SHOTS[0] if count > 100 else SHOTS[1] if count >= 20 else SHOTS[2]


def _check_epochs(config: TrainConfig, epochs: int) -> None:
    """Refuse epochs to stop after, or to save, that the run does not have."""
    asked = {
        "stop_epoch": [config.stop_epoch] if config.stop_epoch is not None else [],
        "save_epochs": config.save_epochs,
    }
    for name, numbers in asked.items():
        wrong = [number for number in numbers if not 1 <= number <= epochs]
        if wrong:
            raise TrainError(f"{spelt(name)} {wrong[0]}: expected 1 to {epochs}, the number of epochs of the run")


def _check_metric(metric: str, counts: list[int] | None, classes: int) -> None:
    if "top" in metric and int(metric.rpartition("top")[2]) >= classes > 1:
        raise TrainError(f"--eval-metric {metric}: the label is always among so many of {classes} classes")
    group = metric.partition("_")[0]
    if group in SHOTS and group not in map(_shots, counts or []):
        known = "the class counts of this data are not known" if counts is None else f"no class is {group}-shot"
        raise TrainError(f"--eval-metric {metric}: {known} (many: above 100 training images, few: below 20)")
