"""The command ``timm train``: check flags and the name of the loss, then import torch and timm and train."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from topk_registry import registry
from topk_registry.errors import BrokenPluginError, Interrupted, TrainError
from topk_registry.train.config import BUILTIN_DEFAULTS, CROSS_ENTROPY, TrainConfig, parse_args

if TYPE_CHECKING:  # importing these modules imports torch
    from topk_registry.train.run import Row, Run
    from topk_registry.train.trainer import TrainResult


def main(argv: Sequence[str]) -> int:
    """Train an image classifier with a loss by name.

    The exit status is 0 for success, 1 if the run failed, 2 if the run could not start, and 128 + N after signal N.
    """
    config = parse_args(argv)
    known = registry.is_loss(config.loss) or not config.resume  # else the checkpoint may record the distribution
    if known and (info := registry.loss_info(config.loss)).status == "broken":  # raises an error for a misspelled name
        raise BrokenPluginError(f"loss {config.loss!r} of {info.distribution} is broken: {info.error}")
    if os.environ.get("RANK", "0") == "0":
        data = " in ".join(filter(None, [config.dataset, config.data_dir]))
        print(f"timm train: {config.model} with loss {config.loss} on {data}: loading torch and the data", flush=True)
    from torch import distributed as dist

    from topk_registry.train.trainer import Trainer

    trainer = Trainer(config)
    status = 2
    message = ""
    try:
        run = trainer.run
        if config.dry_run:
            trainer.dry_run()
            return 0
        status = 1
        result = trainer.fit()
        on_builtin_data = config.dataset == BUILTIN_DEFAULTS["dataset"] and not config.asks("dataset")
        if on_builtin_data and config.loss not in CROSS_ENTROPY and not run.compute.distributed:
            _compare_with_cross_entropy(config, run, result)
        return 0
    except Interrupted as error:
        status, message = 128 + error.signum, f"{error}" if trainer.run.compute.primary else ""
    except TrainError as error:
        message = f"{error}"
    finally:
        with suppress(Exception):  # such as: there is no group
            dist.destroy_process_group()
    if message:
        print(f"timm train: {message}", file=sys.stderr)
    return status


def _compare_with_cross_entropy(config: TrainConfig, run: "Run", result: "TrainResult") -> None:
    """Train again with cross-entropy and otherwise equal settings, and print the metrics of both losses."""
    from topk_registry.train.report import against_cross_entropy, label, number
    from topk_registry.train.trainer import Trainer

    report, metric = run.report, run.metric
    report.say("\nthe same training with cross-entropy, for comparison:")
    own: dict[str, Any] = {
        "loss": "ce",
        "loss_opt": {},
        "smoothing": config.smoothing,
        "eval_metric": run.config.eval_metric,
        "resume": "",
        "log": [],
        "output": str(result.folder),
        "experiment": "cross_entropy",
        "overwrite": True,
    }

    def show(other: "Run", row: "Row") -> None:
        shown = f"{label(metric)} {number(metric, row[metric])}" if metric in row else ""
        report.say(f"Epoch {row['epoch']:g}/{other.num_epochs}: train loss {row['train_loss']:.4f}  {shown}")

    other = Trainer(config.replace(**own), on_epoch=show, quiet=True).fit()
    if run.data.validation is not None:
        images = len(run.data.validation)
        report.say("\n" + against_cross_entropy(config.loss, result.metrics, other.metrics, metric, images))
    if not config.dataset_opt.get("noise"):
        report.say("the training labels of the built-in data are clean; --dataset-opt noise=0.4 replaces 40 % of them")
