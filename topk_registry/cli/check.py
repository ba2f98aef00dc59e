"""The command ``topk-registry check NAME`` checks that any trainer can use the loss NAME."""

import sys
from collections import Counter
from collections.abc import Sequence

from topk_registry.cli import ArgumentParser, ParseOptions, positive
from topk_registry.registry import get_loss_builder
from topk_registry.registry.signatures import CONTEXT, accepted_context, check_options
from topk_registry.testing import iter_checks, run_checks


def main(argv: Sequence[str]) -> int:
    """Check that any trainer can use a registered loss."""
    parser = ArgumentParser(
        prog="topk-registry check",
        description="Check that any trainer can use a registered loss. The exit status is 1 if a check fails. This "
        "command imports the plug-in that defines the loss, so it runs the code of the plug-in.",
    )
    add = parser.add_argument
    add("name", help="a name listed by `topk-registry losses`, or distribution:name")
    add("--loss-opt", nargs="+", default={}, action=ParseOptions, metavar="K=V", help="options of the loss")
    add("--num-classes", type=positive, default=16, metavar="N", help="number of classes in the data (default: 16)")
    add("--expect", nargs="+", action="extend", default=[], metavar="CHECK", help="checks that are expected to fail")
    args = parser.parse_args(argv)
    try:
        factory = get_loss_builder(args.name)
        context = accepted_context(factory, dict.fromkeys(CONTEXT))
        check_options(f"loss {args.name!r}", factory, [*context, *args.loss_opt])
        expected = dict.fromkeys(args.expect, "expected on the command line")
        checks = iter_checks(
            args.name, options=args.loss_opt, num_classes=args.num_classes, expected_failed_checks=expected
        )
    except (TypeError, ValueError) as error:
        print(f"topk-registry check: {error}", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for result in run_checks(checks):
        place = f"\n{'':<36}  {'':<8}  at {result.place}" if result.place else ""
        print(f"{result.name:<36}  {result.status:<8}  {result.message}".rstrip() + place, flush=True)
        counts[result.status] += 1
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(counts["failed"] > 0)
