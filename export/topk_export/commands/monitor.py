"""Say when the images of a service no longer look like those that its prediction sets were calibrated on.

Reads the log of topk-registry serve --log. A martingale test compares it with the calibration: where nothing has
changed it ever raises an alarm with probability at most the level, however often one looks. It needs no labels, and can
miss a change that moves neither the sizes of sets nor the softmax of the best class. The exit status is 3 for an alarm.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from topk_export.commands.common import command, say
from topk_export.runtime.weights import digest_of, files_of
from topk_registry.cli import ArgumentParser, within

ALARM = 3


@command
def main(argv: Sequence[str]) -> int:
    """Say when a service's images no longer look like those of its calibration."""
    args = _parser().parse_args(argv)
    from topk_export.calibration.monitor import monitor_page, read_log, reference_of, verdict, watch
    from topk_registry.pages import write_page

    entries, reference = read_log(args.log), {}
    if args.model:
        reference, digest = reference_of(args.model), digest_of(*files_of(args.model))
        own = [entry for entry in entries if entry.get("sha256", digest) == digest]
        if len(own) < len(entries):
            say(f"left out {len(entries) - len(own)} of {len(entries)} predictions: another model made them")
        entries = own
    monitored = watch(entries, reference, level=args.level, seed=args.seed)
    if args.report:
        write_page(Path(args.report), monitor_page(monitored))
    if args.json:
        rejected = {name: test.rejected_at for name, test in monitored.tests.items()}
        print(json.dumps({"rejected": monitored.rejected, "level": monitored.level, "rejected_at": rejected,
                          "predictions": len(monitored.entries)}))  # fmt: skip
    else:
        print(verdict(monitored))
    return ALARM if monitored.rejected else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry monitor", description=__doc__)
    parser.add_argument("log", metavar="LOG", help="a file that topk-registry serve --log wrote")
    parser.add_argument("--model", metavar="FILE", help="the calibrated file; without it, changes within the log")
    parser.add_argument(
        "--level", type=within("(0, 1)"), default=0.01, help="probability of a false alarm, ever (default: 0.01)"
    )
    parser.add_argument("--report", metavar="FILE", help="a page with the plot")
    parser.add_argument(
        "--seed",
        type=within("[0, inf)", int),
        default=0,
        help="random seed of the ranks among equal values (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser
