"""The arguments of a run, from flags, a file and defaults.

Parsing imports neither torch nor timm, so that ``--help`` and a misspelt loss answer at once.
"""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import yaml

from topk_registry.train.config.flags import ELSEWHERE, config_parser, create_parser

DATASET = "topk/hierarchy"

# What changes where no data is named: a job that a laptop finishes in a minute or two.
BUILTIN_DEFAULTS: dict[str, Any] = {
    "dataset": DATASET,
    "model": "topk_convnet",
    "epochs": 12,
    "batch_size": 64,
    "validation_batch_size": 500,
    "opt": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.05,
    "warmup_epochs": 1,
    "sched_on_updates": True,
    "no_aug": True,
    "smoothing": 0.0,
    "workers": 0,
}

# timm's names of losses from before --loss, and what they belong to
LEGACY = {"jsd_loss": "jsd", "bce_loss": "bce", "bce_sum": "bce", "bce_target_thresh": "bce", "bce_pos_weight": "bce"}

# keys of an args.yaml that are no flags
NOT_FLAGS = {"loss_record"}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a run: flags over ``--config`` over the built-in job's defaults over timm's defaults."""
    parser = create_parser()
    first, _ = config_parser().parse_known_args(argv)
    config = _read_config(parser, first.config)
    named = {**vars(parser.parse_args([])), **config, **_given(argv)}
    if not (named["data"] or named["data_dir"] or named["dataset"]):
        parser.set_defaults(**BUILTIN_DEFAULTS)
    parser.set_defaults(**config)
    args = parser.parse_args(argv)
    args.data_dir = args.data_dir or args.data
    args.data = None
    args.grad_accum_steps = max(1, args.grad_accum_steps)
    _map_legacy_losses(parser, args)
    _refuse(parser, args)
    return args


def _given(argv: Sequence[str]) -> dict[str, Any]:
    bare = create_parser()
    bare.set_defaults(**dict.fromkeys(vars(bare.parse_args([])), None))
    return {name: value for name, value in vars(bare.parse_args(argv)).items() if value is not None}


def _read_config(parser: argparse.ArgumentParser, file: str) -> dict[str, Any]:
    if not file:
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            config = yaml.safe_load(stream)
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config {file}: {error}")
    if not isinstance(config, dict):
        parser.error(f"--config {file}: expected names and values, got {type(config).__name__}")
    known = vars(parser.parse_args([]))
    unknown = [str(name) for name in config if name not in known and name not in NOT_FLAGS]
    if unknown:
        close = get_close_matches(unknown[0], known, n=1)
        parser.error(
            f"--config {file}: timm train has no setting {', '.join(map(repr, unknown))}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )
    return {name: value for name, value in config.items() if name in known}


def _map_legacy_losses(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Turn timm's older flags into ``loss`` and ``loss_opt``, and take them back, so that args.yaml says it once."""
    given = {name: getattr(args, name) for name in LEGACY if getattr(args, name) not in (None, False)}
    args.loss = args.loss or ("jsd" if args.jsd_loss else "bce" if args.bce_loss else "ce")
    for name in given:
        if args.loss != LEGACY[name]:
            parser.error(f"--{name.replace('_', '-')} is for --loss {LEGACY[name]}, and the loss is {args.loss}")
        setattr(args, name, False if isinstance(given[name], bool) else None)
    options = {name: given[name] for name in ("bce_sum", "bce_target_thresh") if name in given}
    if "bce_pos_weight" in given:
        options["pos_weight"] = given["bce_pos_weight"]
    if args.loss == "jsd":
        options["jsd_splits"] = args.aug_splits
    args.loss_opt = {**options, **args.loss_opt}


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name, default in ELSEWHERE.items():
        if (getattr(args, name) or None) != (default or None):
            parser.error(
                f"--{name.replace('_', '-')} is for timm's own training script: run that, with any registered loss, by "
                "--train-script PATH"
            )
    if args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax:
        if args.batch_size % 2:
            parser.error(f"mixup and cutmix need an even --batch-size, got {args.batch_size}")
        if args.aug_splits:
            parser.error("mixup and cutmix cannot be combined with --aug-splits")
    if args.aug_splits == 1 or (args.aug_splits and args.no_aug):
        parser.error("--aug-splits must be 0, or at least 2 without --no-aug")
    if args.amp and args.model_dtype not in (None, "float32"):
        parser.error(f"--amp needs a float32 model, got --model-dtype {args.model_dtype}")
