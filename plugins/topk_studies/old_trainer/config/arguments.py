"""The command line of ``timm train``.

Parsing imports neither torch nor timm, so that ``--help`` and a misspelt loss answer at once.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

import yaml

from topk_registry.cli import ArgumentParser, ParseOptions
from topk_registry.train.errors import ConfigError
from topk_studies.old_trainer.config import flags
from topk_studies.old_trainer.config.config import TrainConfig, spelt, value_type
from topk_studies.old_trainer.config.timm_names import ELSEWHERE, LEGACY, OPTIONS

GROUPS = TrainConfig.__mro__[1:-1]  # the dataclasses of flags.py


def parse_args(argv: Sequence[str]) -> TrainConfig:
    """The configuration of a run: flags over ``--config`` over the defaults."""
    parser = create_parser()
    given = vars(parser.parse_args(argv))
    file = given.pop("config", "")
    if given.get("loss") == "":  # as of a variable that is not set
        parser.error("--loss is empty: expected the name of a loss (`timm losses` lists them)")
    try:
        saved = read_config(file) if file else {}
        return TrainConfig.from_dict(_merged(without_other_loss(saved, given, parser.prog), given))
    except ConfigError as error:
        parser.error(str(error))


def read_config(file: str) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises:
        ConfigError: it cannot be read, or holds names that are no settings.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            settings = yaml.safe_load(stream)
    except (OSError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or error  # the flag names the file already
        raise ConfigError(f"--config {file}: {why}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {file}: expected names and values, got {type(settings).__name__}")
    try:
        TrainConfig.from_dict(settings)
    except ConfigError as error:
        raise ConfigError(f"--config {file}: {error}") from error
    return settings


def without_other_loss(saved: Mapping[str, Any], given: Mapping[str, Any], program: str) -> dict[str, Any]:
    """The saved settings without the options of a loss that another one takes the place of; says which they are."""
    named = (loss for flag, loss in LEGACY.items() if saved.get(flag))
    old = saved.get("loss") or next(named, flags.LossFlags().loss)
    new = given.get("loss") or old
    if new == old:
        return dict(saved)
    usual = dict.fromkeys(LEGACY) | OPTIONS
    options = {name: saved[name] for name in usual if saved.get(name) not in (None, False, usual[name])}
    options |= saved.get("loss_opt") or {}
    if options and os.environ.get("RANK", "0") == "0":
        told = " ".join(f"{name}={value}" for name, value in options.items())
        print(f"{program}: --loss {new} in the place of {old!r}, whose options are left out: {told}", file=sys.stderr)
    return {name: value for name, value in saved.items() if name not in ("loss_opt", *usual)}


def create_parser() -> ArgumentParser:
    """Return the parser; its result holds the given flags only."""
    parser = ArgumentParser(
        prog="timm train",
        description="Train an image classifier by the name of its loss. No data named: on a built-in data set.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file of settings, such as an args.yaml")
    parser.add_argument("data", nargs="?", metavar="DIR", help="the data's root directory (or --data-dir)")
    for each in GROUPS:
        group = parser.add_argument_group((each.__doc__ or "").rstrip("."))
        hints = get_type_hints(each)
        for setting in fields(each):
            _add(group, setting, hints[setting.name])
        if each is flags.LossFlags:
            _add_others(group)
    for name, default in ELSEWHERE.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": _type_of(default)}
        nargs: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(spelt(name), help=argparse.SUPPRESS, **kind, **nargs)
    return parser


def _add(group: Any, setting: "Field[Any]", hint: Any) -> None:
    said, (kind, items) = setting.metadata, value_type(hint)
    default = None if setting.default is MISSING else setting.default
    shown = "" if default in (None, "", False) or "default" in said["help"] else f" (default: {default})"
    options: dict[str, Any] = {"help": said["help"].replace("%", "%%") + shown}
    if kind is bool:
        options["action"] = "store_true"
    elif kind is dict:
        options |= {"nargs": "*", "action": ParseOptions, "metavar": "K=V"}
    else:
        options |= {"type": items or kind, "metavar": said["metavar"], "choices": said["choices"] or None}
        if items:
            options["nargs"] = said["nargs"] or "+"
        elif said["const"] is not None:
            options |= {"nargs": "?", "const": said["const"]}
    short = [name for name in said["names"] if not name.startswith("--")]
    long = [name for name in said["names"] if name.startswith("--")]
    group.add_argument(*short, spelt(setting.name), *long, dest=setting.name, **options)


def _add_others(group: Any) -> None:
    group.add_argument(
        "--train-script",
        metavar="PATH",
        help="run this copy of timm's train.py instead, with --loss added to its flags (or set TIMM_TRAIN_SCRIPT)",
    )
    group.add_argument("--jsd-loss", action="store_true", help="timm's name for --loss jsd; needs --aug-splits")
    group.add_argument("--bce-loss", action="store_true", help="timm's name for --loss bce")
    group.add_argument("--bce-sum", action="store_true", help="sum bce over classes")
    group.add_argument("--bce-target-thresh", type=float, help="take targets of bce above this for 1, others for 0")
    group.add_argument("--bce-pos-weight", type=float, help="weight of the positive term of bce")
    for name, usual in OPTIONS.items():  # as --loss-opt NAME=VALUE, which is the way for all losses
        group.add_argument(spelt(name), type=str if isinstance(usual, str) else float, help=argparse.SUPPRESS)
    group.add_argument("--persistent-workers", action="store_true", help=argparse.SUPPRESS)  # which they are


def _type_of(default: Any) -> type:
    return type(default) if isinstance(default, (int, float)) else str


def _merged(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings over the saved ones; options of both are joined."""
    merged = {**saved, **given}
    for name in merged:
        if isinstance(saved.get(name), dict) and isinstance(given.get(name), dict):
            merged[name] = {**saved[name], **given[name]}
    return merged
