"""``topk-registry check-dataset NAME``: the checks of a registered data set, before a run trains on it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from topk_registry.cli import ArgumentParser, ParseOptions, positive
from topk_registry.cli.check import printed
from topk_registry.cli.progress import Progress
from topk_registry.registry.options import check_options
from topk_registry.testing.datasets import CHECKS, dataset_subject, run_dataset_checks

PREFIX = "topk/"  # of --dataset


def main(argv: Sequence[str]) -> int:
    """Check that a registered data set can be trained on."""
    args = _parser().parse_args(argv)
    name = args.name.removeprefix(PREFIX)
    splits = args.train_split, args.val_split
    try:
        subject = dataset_subject(name, options=args.dataset_opt, splits=splits, samples=args.samples)
        check_options(f"dataset {name!r}", subject.factory, ["split", *args.dataset_opt])
    except TypeError as error:
        print(f"topk-registry check-dataset: {error}", file=sys.stderr)
        return 2
    progress = Progress(len(CHECKS), sys.stderr)
    running = run_dataset_checks(subject, started=progress)
    results = list(running) if args.json else list(printed(running, progress.clear))
    progress.clear()
    if args.json:
        report = {"dataset": name, "options": args.dataset_opt, "splits": splits}
        print(json.dumps({**report, "results": [asdict(result) for result in results]}, indent=2, default=str))
    return int(any(result.status == "failed" for result in results))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry check-dataset",
        description="Check that a registered data set keeps its contract: splits, samples, classes, labels, transform, "
        "workers and batches. The exit status is 1 where a check fails. Opening the data set imports its plug-in, "
        "which runs its code.",
    )
    parser.add_argument("name", help="a name of `topk-registry datasets`, or distribution:name")
    parser.add_argument(
        "--dataset-opt", nargs="+", default={}, action=ParseOptions, metavar="K=V", help="options of the data set"
    )
    parser.add_argument("--train-split", default="train", metavar="NAME", help="the split to train on (default: train)")
    parser.add_argument(
        "--val-split", default="validation", metavar="NAME", help="the split to evaluate on (default: validation)"
    )
    parser.add_argument(
        "--samples", type=positive, default=64, metavar="N", help="the most samples of a split to read (default: 64)"
    )
    parser.add_argument("--json", action="store_true", help="print all results, for programs")
    return parser
