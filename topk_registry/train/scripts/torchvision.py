"""``topk-registry torchvision-train --script PATH``: torchvision's own training script, with a loss by name."""

import sys
from collections.abc import Sequence

from topk_registry.train.scripts.run import run_torchvision, split_arguments

PROGRAM = "topk-registry torchvision-train"
USAGE = f"""usage: {PROGRAM} --script PATH [--loss NAME] [--loss-opt K=V ...] [--class-weight HOW] ...

Runs torchvision's references/classification/train.py (its folder as it is in a checkout), unmodified, with a registered
loss in the place of its own; evaluation keeps cross-entropy. --class-weight weighs the classes, as in timm train, with
--loss-weight-power, --loss-weight-beta and --loss-weight-max. Every other argument is the script's."""


def main(argv: Sequence[str]) -> int:
    """Run torchvision's training script with a loss by name."""
    ours, theirs = split_arguments(argv, prog=PROGRAM, flag="--script")
    if ours.script:
        return run_torchvision(ours.script, theirs, ours)
    if "-h" in theirs or "--help" in theirs:
        print(USAGE)
        return 0
    print(f"{PROGRAM}: the following arguments are required: --script; see {PROGRAM} --help", file=sys.stderr)
    return 2
