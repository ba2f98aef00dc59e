"""Times and peak memory of all contestants for one operator, side by side in one run, once its tests pass.

On a GPU (``--device cuda``) the cases are those of docs/speed.md: indices and distributions, single and half precision,
with and without CUDA graphs, caches flushed, beside compiled cross-entropy. With ``--junit`` the outcome of the tests
is read from a report of theirs and noted, and times are taken even where some failed.

Other measurements have commands of their own: ``python -m tests.bench instructions`` counts the machine instructions of
the GPU kernels, ``linear`` times classifiers with very many classes beside those of PyTorch, ``chunked_update`` times
their whole training steps and measures the memory, ``scoring MODEL`` times ``topk-registry score``, ``serving MODEL``
loads the HTTP service by numbers of workers and clients, and ``trials`` puts it under the loads that once took it down.
``first_use`` times the first call of each loss, ``steps`` training steps and the loss's share of them, and ``targets
DIR`` says of the reports of a GPU in a folder which targets they meet.
"""

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tests.bench.bandwidth import copy_bandwidth
from tests.bench.gate import green, outcome
from tests.bench.operators import GPU_SHAPES, OPERATORS, gpu_options
from tests.bench.report import dumps, environment, record, table
from topk_studies.timing.contest import Case, Operator
from topk_studies.timing.measure import measure

OTHERS = ("first_use", "linear", "scoring", "serving", "steps", "targets", "trials")
QUICK_SHAPES = ((8, 50, 3), (8, 200, 5))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in OTHERS:
        # imported when asked for: each needs extras of its own
        return import_module(f"tests.bench.{argv[0]}").main(argv[1:])
    args = _parser().parse_args(argv)
    operator = OPERATORS[args.operator]
    try:
        if not args.junit:
            print(f"running the tests first: {' '.join(operator.tests)}", file=sys.stderr)
        if not args.junit and not green(operator.tests):
            return 1
    except KeyboardInterrupt:
        return 130
    if args.threads:
        torch.set_num_threads(args.threads)
    return _run(operator, args)


def _run(operator: Operator, args: argparse.Namespace) -> int:
    """Measure case by case; every case is printed and saved before the next begins."""
    contestants = operator.contestants(args.peer_path)
    if args.only:
        contestants = [one for one in contestants if any(fnmatchcase(one.name, pattern) for pattern in args.only)]
    cases = [(case, [one for one in contestants if one.takes_part(case)]) for case in _cases(operator, args)]
    report = _new_report(args)
    bandwidth = copy_bandwidth(args.device)
    total = sum(len(taking) for _, taking in cases) * (1 + args.repeats)
    with tqdm(total=total, file=sys.stderr, disable=None, leave=False, bar_format="{l_bar}{bar}| {elapsed}") as bar:
        for number, (case, taking) in enumerate(cases, 1):
            if bar.disable:  # nobody looks at a bar: a line a case for the log
                print(f"{number}/{len(cases)} {case.title}", file=sys.stderr, flush=True)

            def tick(name: str, count: int, title: str = case.title) -> None:
                bar.set_description(f"{title} {name}", refresh=False)
                bar.update(count)

            rows, interrupted = measure(case, taking, repeats=args.repeats, limit=args.limit, tick=tick)
            bar.write(f"{table(rows, bandwidth)}\n", file=sys.stdout)
            report["results"] += [record(row, bandwidth) for row in rows]
            report["interrupted"] = interrupted
            if args.json:
                args.json.write_text(dumps(report))
            if interrupted:
                return 130
    return 0


def _new_report(args: argparse.Namespace) -> dict[str, Any]:
    found = environment(args.device)
    if found["busy"]:
        print(f"the machine is busy ({found['busy']}): only large ratios mean anything", file=sys.stderr)
    settings = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    tests = {"tests": outcome(args.junit)} if args.junit else {}
    return {"environment": found, "settings": settings, **tests, "interrupted": False, "results": []}


def _cases(operator: Operator, args: argparse.Namespace) -> list[Case]:
    gpu = args.gpu_cases or args.device.startswith("cuda")
    shapes = args.shapes or (QUICK_SHAPES if args.quick else GPU_SHAPES if gpu else operator.shapes)
    dtypes = args.dtype or (["float32", "bfloat16"] if gpu else ["float32"])
    return [
        Case(*shape, options=options, device=args.device, dtype=getattr(torch, dtype))
        for shape, dtype, options in product(shapes, dtypes, gpu_options(operator) if gpu else operator.options)
    ]


def _shape(text: str) -> tuple[int, int, int]:
    try:
        B, n, k = map(int, text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected B,n,k such as 256,1000,5, got {text!r}") from None
    return B, n, k


def _parser() -> argparse.ArgumentParser:
    operators = "; ".join(f"{name}: {operator.summary}" for name, operator in OPERATORS.items())
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("operator", choices=OPERATORS, help=operators)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--gpu-cases", action="store_true", help="the cases of a GPU, on whatever device")
    precisions = ("float32", "float64", "bfloat16", "float16")
    parser.add_argument("--dtype", nargs="+", choices=precisions, help="default: float32, on a GPU bfloat16 too")
    parser.add_argument("--threads", type=int, help="threads of PyTorch (default: its own choice)")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="B,n,k", help="instead of the operator's own")
    parser.add_argument("--repeats", type=int, default=30, help="rounds over all contestants")
    parser.add_argument(
        "--limit", type=float, default=4.0, help="seconds of a contestant at one case, once it is compiled"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants by their names, or patterns of them")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="the tests' own report, instead of running them")
    parser.add_argument("--peer-path", type=Path, help="checkout of the authors' smooth-topk, to run it too")
    parser.add_argument("--json", type=Path, help="write environment, settings and results to this file")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
