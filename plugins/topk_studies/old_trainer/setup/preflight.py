"""Refuse within a second a run that cannot work, before any data is read or any weight is made."""

from collections.abc import Sequence
from difflib import get_close_matches

from timm.models import get_arch_pretrained_cfgs, is_model, list_models
from timm.optim import get_optimizer_class, list_optimizers

from topk_registry.losses.batch import BatchLoss
from topk_registry.nn import convnet  # noqa: F401  registers the built-in networks
from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.metric_names import parse_metric
from topk_studies.old_trainer.config.tasks import MULTILABEL
from topk_studies.old_trainer.setup.class_weights import ClassWeights, counted_twice, stats_of
from topk_studies.old_trainer.setup.datasets import PREFIX, check_training_data
from topk_studies.old_trainer.setup.heads import check_head
from topk_studies.old_trainer.setup.loss import Context, LossSpec, uses_soft_targets
from topk_studies.old_trainer.setup.parts import Parts
from topk_studies.old_trainer.setup.rehearsal import Rehearsal
from topk_studies.old_trainer.setup.sampler import check_indexed

LIKELY_CLASSES = 1000


def check(config: TrainConfig, loss: LossSpec, parts: Parts, *, compiles: bool = True) -> tuple[Rehearsal, list[str]]:
    """Refuse a run that cannot work; return the rehearsed loss, and sentences for the plan of the run.

    ``compiles`` says whether kernels may be compiled for it.
    """
    if parts.train_loader is None:
        check_training_data(config)
    else:
        check_indexed(config, "the train_loader")
    if parts.model is None:
        _check_model(config.model)
    if config.retrain_head:
        check_head(config)
    _check_numbers(config)
    n = config.num_classes or (100 if config.dataset.startswith(PREFIX) else _classes_of_model(config.model))
    if config.class_parallel:
        raise TrainError(
            "--class-parallel is not supported: use topk_registry.LinearSmoothTopK(process_group=...) in a training "
            "loop of your own"
        )
    loss.check_smoothing(config.smoothing)
    loss.check_weights(config.class_weight)
    loss.check_positive_weights(config.loss_pos_weight)
    weights, positive = (ClassWeights.of(config, setting) for setting in ("class_weight", "loss_pos_weight"))
    _check_stats(
        config, loss.needs_class_counts or any(each is not None and each.needs_counts for each in (weights, positive))
    )
    context = Context.of(
        config, n, class_weight=weights and weights.example(n), pos_weight=positive and positive.example(n)
    )
    rehearsal = Rehearsal(loss, context, splits=config.aug_splits, seed=config.seed, compiles=compiles)
    epochs = config.epochs + config.cooldown_epochs + (config.warmup_epochs if config.warmup_prefix else 0)
    rehearsal.check_schedule(epochs)
    return rehearsal, [
        *_notes(config, loss, parts),
        *_of_batch(config, loss, rehearsal),
        *_idle(loss, rehearsal.idle_options(epochs)),
    ]


def _of_batch(config: TrainConfig, loss: LossSpec, rehearsal: Rehearsal) -> list[str]:
    """Say what a batch is for a loss of the batch as a whole, where several make up an update."""
    if not isinstance(rehearsal.criterion, BatchLoss) or config.grad_accum_steps == 1:
        return []
    return [
        f"loss {loss.name!r} looks at a batch as a whole: each of the {config.grad_accum_steps} batches of an update, "
        f"of {config.batch_size} images in each process, is one by itself"
    ]


def _check_stats(config: TrainConfig, used: bool) -> None:
    """Refuse a file of class counts that cannot be read, or that nothing uses."""
    if config.class_stats and not used:
        raise TrainError(
            f"--class-stats {config.class_stats} has no effect: it is for a loss that takes class counts, or for "
            "--class-weight inv_freq or effective_num, or --loss-pos-weight neg_pos"
        )
    if config.class_stats:
        stats_of(config.class_stats)


def _idle(loss: LossSpec, options: list[str]) -> list[str]:
    given = ", ".join(f"{name}={loss.options[name]}" for name in options)
    return [f"without effect: {given}; {loss.name!r} is the same without"] if options else []


def _notes(config: TrainConfig, loss: LossSpec, parts: Parts) -> list[str]:
    notes = []
    if config.smoothing:
        mixed = ", in the mixed targets" if uses_soft_targets(config) else ""
        without = "" if mixed or loss.takes_smoothing else f" has no effect: {loss.name!r} takes none"
        notes.append(f"label smoothing {config.smoothing:g}{mixed}{without}")
    elif loss.own_smoothing:
        notes.append(f"label smoothing {loss.own_smoothing:g}, by the loss's option")
    one_label = config.task != MULTILABEL  # the papers of such losses have cosine classifiers
    if one_label and config.normalize_classifier is None and loss.wants_cosine(parts.model):
        notes.append(f"loss {loss.name!r} knows class frequencies; its paper's recipe may want --normalize-classifier")
    notes += counted_twice(config, loss.name if loss.needs_class_counts else "")
    if config.val_split and config.val_split == config.train_split:
        notes.append("evaluation is on the training split")
    return notes


def _check_model(name: str) -> None:
    if not is_model(name.split("/", 1)[-1].split(".")[0]) and ":" not in name:
        raise _unknown("model", name, list_models())


def _unknown(what: str, name: str, known: Sequence[str]) -> TrainError:
    holding = sorted((other for other in known if name in other), key=lambda other: not other.startswith(name))
    close = holding[:5] or get_close_matches(name, known, n=5)
    return TrainError(f"timm has no {what} {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))


def _check_numbers(config: TrainConfig) -> None:
    parse_metric(config.eval_metric, config.task)
    try:
        get_optimizer_class(config.opt)
    except ValueError as error:
        raise _unknown("optimizer", config.opt, [str(name) for name in list_optimizers()]) from error
    if config.epochs < 1 or config.batch_size < 1:
        raise TrainError(f"--epochs and --batch-size must be at least 1, got {config.epochs} and {config.batch_size}")


def _classes_of_model(name: str) -> int:
    configs = get_arch_pretrained_cfgs(name.split(".")[0]) if ":" not in name else {}
    first = next(iter(configs.values()), None)
    return (first.num_classes if first else None) or LIKELY_CLASSES
