"""``topk-registry check NAME``: the conformance kit on a registered loss."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from topk_registry.cli import ArgumentParser, ParseOptions, positive
from topk_registry.cli.progress import Progress
from topk_registry.registry import get_loss_builder
from topk_registry.registry.options import CONTEXT, accepted_context, check_options
from topk_registry.testing import iter_checks, run_checks
from topk_registry.testing.result import CheckResult


def main(argv: Sequence[str]) -> int:
    """Run the conformance kit on a registered loss."""
    args = _parser().parse_args(argv)
    options = args.opt
    expected = dict.fromkeys(args.expect, "expected on the command line")
    try:
        build = get_loss_builder(args.name)
        check_options(f"loss {args.name!r}", build, [*accepted_context(build, dict.fromkeys(CONTEXT)), *options])
        checks = iter_checks(args.name, options=options, num_classes=args.num_classes, expected_failed_checks=expected)
    except (TypeError, ValueError) as error:
        print(f"topk-registry check: {error}", file=sys.stderr)
        return 2
    checks = list(checks)
    progress = Progress(len(checks), sys.stderr)  # the first checks compile kernels for a while
    running = run_checks(checks, started=lambda check: progress(check.name))
    results = list(running) if args.json else list(printed(running, progress.clear))
    progress.clear()
    if args.json:
        report = {"loss": args.name, "options": options, "num_classes": args.num_classes}
        print(json.dumps({**report, "results": [asdict(result) for result in results]}, indent=2, default=str))
    return int(any(result.status == "failed" for result in results))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry check",
        description="Run the conformance kit on a registered loss. The exit status is 1 where a check fails. Building "
        "the loss imports its plug-in, which runs its code.",
    )
    parser.add_argument("name", help="a name of `topk-registry losses`, or distribution:name")
    parser.add_argument("--opt", nargs="+", default={}, action=ParseOptions, metavar="K=V", help="options of the loss")
    parser.add_argument(
        "--num-classes", type=positive, default=16, metavar="N", help="classes in the data (default: 16)"
    )
    parser.add_argument(
        "--expect",
        nargs="+",
        action="extend",
        default=[],
        metavar="CHECK",
        help="checks that must fail, and are then no failure",
    )
    parser.add_argument("--json", action="store_true", help="print all results, for programs")
    return parser


def printed(results: Iterable[CheckResult], clear: Callable[[], None]) -> Iterable[CheckResult]:
    """The results as they come, each after its line of the table; the counts last."""
    counts: Counter[str] = Counter()
    for result in results:
        clear()
        print(f"{result.name:<36}  {result.status:<8}  {result.message}".rstrip(), flush=True)
        if result.place:
            print(f"{'':<36}  {'':<8}  at {result.place}", flush=True)
        counts[result.status] += 1
        yield result
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
