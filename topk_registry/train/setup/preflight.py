"""What can be refused within a second, before any data is read or any weight is made."""

from argparse import Namespace

from timm.models import get_arch_pretrained_cfgs, is_model, list_models
from timm.optim import get_optimizer_class

from topk_registry.train.engine.evaluate import parse_metric
from topk_registry.train.errors import TrainError
from topk_registry.train.setup import convnet  # noqa: F401  registers the built-in network
from topk_registry.train.setup.criterion import (
    Context,
    needs_class_counts,
    takes_smoothing,
    try_criterion,
    uses_soft_targets,
)
from topk_registry.train.setup.datasets import check_training_data

LIKELY_CLASSES = 1000


def check(args: Namespace) -> list[str]:
    """Refuse a run that cannot work; returns what its user should know of one that can."""
    check_training_data(args)
    _check_names(args)
    args.eval_metric = parse_metric(args.eval_metric)
    n = args.num_classes or (100 if args.dataset.startswith("topk/") else _classes_of_model(args.model))
    try_criterion(args.loss, args.loss_opt, Context.of(args, n), splits=args.aug_splits)
    return _notes(args)


def _notes(args: Namespace) -> list[str]:
    notes = []
    if args.smoothing and not uses_soft_targets(args):
        taken = takes_smoothing(args.loss)
        notes.append(
            f"label smoothing {args.smoothing:g}" + ("" if taken else f" has no effect: {args.loss!r} takes none")
        )
    if needs_class_counts(args.loss) and args.normalize_classifier is None:
        notes.append(f"loss {args.loss!r} knows class frequencies; its paper's recipe may want --normalize-classifier")
    return notes


def _check_names(args: Namespace) -> None:
    if not is_model(args.model.split("/", 1)[-1].split(".")[0]) and ":" not in args.model:
        close = list_models(f"*{args.model}*")[:5]
        raise TrainError(f"timm has no model {args.model!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
    try:
        get_optimizer_class(args.opt)
    except ValueError as error:
        raise TrainError(f"timm has no optimizer {args.opt!r}") from error
    if args.epochs < 1 or args.batch_size < 1:
        raise TrainError(f"--epochs and --batch-size must be at least 1, got {args.epochs} and {args.batch_size}")


def _classes_of_model(name: str) -> int:
    configs = get_arch_pretrained_cfgs(name.split(".")[0]) if ":" not in name else {}
    first = next(iter(configs.values()), None)
    return (first.num_classes if first else None) or LIKELY_CLASSES
