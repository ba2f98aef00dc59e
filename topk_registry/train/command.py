"""The command ``timm train``: check flags and the name of the loss, then import torch and timm and train."""

import os
from collections.abc import Sequence

from topk_registry import registry
from topk_registry.errors import BrokenPluginError
from topk_registry.train.config import parse_args


def main(argv: Sequence[str]) -> int:
    """Train an image classifier with a loss by name."""
    config = parse_args(argv)
    known = registry.is_loss(config.loss) or not config.resume  # else the checkpoint may record the distribution
    if known and (info := registry.loss_info(config.loss)).status == "broken":  # raises an error for a misspelled name
        raise BrokenPluginError(f"loss {config.loss!r} of {info.distribution} is broken: {info.error}")
    if os.environ.get("RANK", "0") == "0":
        data = " in ".join(filter(None, [config.dataset, config.data_dir]))
        print(f"timm train: {config.model} with loss {config.loss} on {data}: loading torch and the data", flush=True)
    from topk_registry.train.trainer import train

    return train(config)
