"""``topk-registry torchvision-train --script PATH``: torchvision's own training script, with a loss by name."""

import sys
from collections.abc import Sequence

from topk_registry.train.scripts.run import run_torchvision, split_arguments

USAGE = """usage: topk-registry torchvision-train --script PATH [--loss NAME] [--loss-opt K=V ...] ...

Runs torchvision's references/classification/train.py (its folder as it is in a checkout), unmodified, with a registered
loss in the place of its own; evaluation keeps cross-entropy. Every other argument is the script's."""


def main(argv: Sequence[str]) -> int:
    ours, theirs = split_arguments(argv, prog="topk-registry torchvision-train", flag="--script")
    if not ours.script:
        asked = "-h" in theirs or "--help" in theirs
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return run_torchvision(ours.script, theirs, ours)
