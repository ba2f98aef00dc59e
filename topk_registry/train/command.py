"""``timm train``: parsing and checks that need neither torch nor timm."""

import os
import time
from collections.abc import Sequence

from topk_registry import registry
from topk_registry.registry.errors import BrokenPluginError
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.scripts.run import ENVIRONMENT, run_timm, split_arguments


def main(argv: Sequence[str]) -> int:
    """Train an image classifier with a loss by name."""
    began = time.perf_counter()
    ours, theirs = split_arguments(argv, prog="timm train", flag="--train-script")
    script = ours.script or os.environ.get(ENVIRONMENT, "")
    if script:
        return run_timm(script, theirs, ours)
    config = parse_args(argv)
    info = registry.loss_info(config.loss)  # a misspelt name is an error here, before anything slow
    if info.status == "broken":
        raise BrokenPluginError(f"loss {config.loss!r} of {info.distribution} is broken: {info.error}")
    from topk_registry.train.engine.trainer import train

    return train(config, began=began)
