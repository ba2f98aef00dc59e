"""Time losses on the CPU, relative to cross-entropy on the same kind of target.

    python -m benchmarks.losses [--losses smooth_topk_svm,focal] [--targets labels] [--against PYTHON] [--json FILE]
    python -m benchmarks.losses --kernels --threads 1 --processor-time --json docs/results/kernels.json

A result is the time of a forward and backward pass, divided by the time of ``F.cross_entropy``. In each round, all
losses are timed in turn, and the result is the median over rounds. ``--against PYTHON`` compares this checkout with
another one: PYTHON is the interpreter of an environment with the other checkout. The losses of both checkouts are timed
in the same rounds. The last column is the time of this checkout divided by the time of the other checkout.
``--kernels`` times the losses that have numba kernels on 256 x 1000 logits, with numba and with PyTorch operations. The
last column is the time with numba divided by the time with PyTorch operations.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SHAPES = ((64, 100), (256, 1000), (256, 10_000))
TARGETS = ("labels", "smoothing", "mixup")
CROSS_ENTROPY = "cross_entropy"
LEAST_SECONDS = 0.01  # duration of one measurement; if a call takes less time, several calls are measured
WARM_UP = 3  # calls before the first measurement
# Families of losses, and upper bounds on their results at each shape in SHAPES: first for the target "labels", then for
# the targets "smoothing" and "mixup".
TOPK = ("smooth_topk_svm", "topk_nll")
SOFTMAX = ("focal", "encouraging", "logit_adjustment")
# F.cross_entropy(30 * scores, labels) alone costs 2.4 times F.cross_entropy(scores, labels) at 256x1000, and 2.1 times
# at 256x10000.
SCALED = ("ldam",)
HINGES = ("topk_svm", "topk_hinge", "topk_hinge_convex", "topk_hinge_calibrated")
NOISED = ("noised_topk", "noised_topk_imbalanced")
SIGMOID = ("sigmoid_mse", "sigmoid_mae", "mirror")
SQUARES = ("log_taylor_softmax", "log_spherical_softmax")  # sums that cannot overflow, from many small operations
NEWTON = ("spherical_bound",)  # solves an equation for each row, in about 90 operations on B numbers
BOUNDS: dict[tuple[str, ...], tuple[tuple[float, ...], tuple[float, ...]]] = {
    TOPK: ((3, 1.8, 1), (3, 2.5, 1)),
    SOFTMAX: ((3.5, 2.3, 1.4), (6, 15, 6)),
    SCALED: ((3.5, 2.8, 2.3), (6, 15, 6.5)),
    HINGES: ((5, 3.2, 1.6), (6, 15, 6)),
    NOISED: ((4, 3, 1.5), (6, 15, 6)),
    SIGMOID: ((4, 3, 3), (6, 15, 6)),
    SQUARES: ((5, 3, 3), (6, 15, 6)),
    NEWTON: ((8.5, 4, 3.2), (6, 15, 6)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"class_counts": True} for name in ("ldam", "logit_adjustment", "noised_topk_imbalanced")
}


def bound(loss: str, target: str, shape: tuple[int, int]) -> float | None:
    """Return the largest accepted time of a loss divided by the time of cross-entropy, or None without a bound."""
    for family, (labels, others) in BOUNDS.items():
        if loss in family and shape in SHAPES:
            return (labels if target == "labels" else others)[SHAPES.index(shape)]
    return None


def step(loss: str, target: str, rows: int, classes: int, dtype: str) -> Callable[[], None]:
    """Return a function that runs one forward and backward pass of a loss."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).to(getattr(torch, dtype)).requires_grad_()
    labels = torch.randint(classes, (rows,), generator=generator)
    smoothing = 0.1 if target == "smoothing" else 0.0
    answer = mixed(labels, classes) if target == "mixup" else labels
    if loss == CROSS_ENTROPY:
        criterion = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    else:
        from topk_registry import create_loss

        options = dict(OPTIONS.get(loss, {}))
        if options.pop("class_counts", False):
            options["class_counts"] = [1 + 1000 // (1 + c) for c in range(classes)]
        criterion = create_loss(loss, label_smoothing=smoothing, **options)

    def call() -> None:
        logits.grad = None
        criterion(logits, answer).backward()

    return call


def mixed(labels: Tensor, classes: int) -> Tensor:
    """Return the targets of mixup for samples b = 0..B-1: 0.7 one_hot(labels[b]) + 0.3 one_hot(labels[B - 1 - b])."""
    one_hot = F.one_hot(labels, classes).float()
    return 0.7 * one_hot + 0.3 * one_hot.flip(0)


class Timer:
    """Times losses in this process. For equal arguments, the function that :func:`step` returns is created once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.steps: dict[tuple[Any, ...], tuple[Callable[[], None], int]] = {}

    def seconds(self, *case: Any) -> float:
        """Return the seconds of one forward and backward pass. ``case`` has the arguments of :func:`step`."""
        if case not in self.steps:
            call = step(*case)
            for _ in range(WARM_UP):
                call()
            begin = time.perf_counter()
            call()
            self.steps[case] = call, max(1, int(LEAST_SECONDS / (time.perf_counter() - begin)))
        call, calls = self.steps[case]
        begin = self.clock()
        for _ in range(calls):
            call()
        return (self.clock() - begin) / calls


def work(clock: Callable[[], float]) -> None:
    """Read arguments of :func:`step`, one JSON list per line of stdin. Print the seconds of each pass, or an error."""
    timer = Timer(clock)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            answer: Any = timer.seconds(*case)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


@contextmanager
def worker(python: Path, threads: int, backend: str, *flags: str) -> Iterator[Callable[..., float | str]]:
    """Start a process of the interpreter ``python`` that times losses. Yield a function that times one loss.

    The function takes the arguments of :func:`step` and returns the seconds of one pass, or an error message. The
    process uses ``threads`` CPU threads and the given backend, and gets ``flags`` on its command line.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOPK_REGISTRY_BACKEND": backend}
    command = [str(python), str(Path(__file__).resolve()), "--worker", *flags]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        request, answers = process.stdin, process.stdout

        def seconds(*case: Any) -> float | str:
            request.write(json.dumps(case) + "\n")
            request.flush()
            return json.loads(answers.readline() or '"the process ended"')

        yield seconds
        request.close()


def measure(
    subjects: dict[str, Callable[..., float | str]],
    losses: list[str],
    target: str,
    shape: tuple[int, int],
    dtype: str,
    rounds: int,
) -> dict[str, dict[str, float | str]]:
    """Return ``{loss: {checkout: median seconds}}``. In each round, all losses of all checkouts are timed in turn.

    ``subjects`` has one function of :func:`worker` per checkout. A loss that fails has an error message, not seconds.
    """
    times: dict[tuple[str, str], list[float]] = {}
    failed: dict[tuple[str, str], str] = {}
    cases = [(name, loss) for loss in (CROSS_ENTROPY, *losses) for name in subjects]
    for _ in range(rounds):
        for name, loss in cases:
            if (name, loss) in failed:
                continue
            found = subjects[name](loss, target, *shape, dtype)
            if isinstance(found, str):
                failed[name, loss] = found
            else:
                times.setdefault((name, loss), []).append(found)
    table: dict[str, dict[str, float | str]] = {}
    for name, loss in cases:
        table.setdefault(loss, {})[name] = failed.get((name, loss)) or median(times[name, loss])
    return table


def ratio(one: float | str | None, other: float | str | None) -> float | None:
    return one / other if isinstance(one, float) and isinstance(other, float) else None


def rows_of(table: dict[str, dict[str, float | str]], target: str, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield one dictionary of results per loss in ``table``, the result of :func:`measure`."""
    reference = table[CROSS_ENTROPY]
    for loss, seconds in table.items():
        yield {
            "loss": loss,
            "target": target,
            "shape": list(shape),
            "seconds": seconds,
            "times_cross_entropy": {name: ratio(seconds[name], reference[name]) for name in seconds},
            "bound": bound(loss, target, shape),
            "ratio": ratio(seconds.get("this"), seconds.get("against")),
        }


def shown(row: dict[str, Any]) -> str:
    ours = row["seconds"]["this"]
    if isinstance(ours, str):
        return f"{row['loss']:24} {row['target']:10} {'x'.join(map(str, row['shape'])):>10}  {ours}"
    factor, limit = row["times_cross_entropy"]["this"], row["bound"]
    over = " OVER" if limit is not None and factor is not None and factor > limit else ""
    other = "" if row["ratio"] is None else f"{row['ratio']:8.2f}"
    return (
        f"{row['loss']:24} {row['target']:10} {'x'.join(map(str, row['shape'])):>10} {1e6 * ours:10.0f} us "
        f"{factor:6.2f} {'' if limit is None else limit:>6}{other}{over}"
    )


def main() -> int:
    """Time the losses, print the table, and return the exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__.splitlines()[0])
    parser.add_argument("--losses", default=",".join(name for family in BOUNDS for name in family))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--shapes", default=",".join(f"{B}x{n}" for B, n in SHAPES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--against", type=Path, help="Python interpreter of an environment with another checkout")
    parser.add_argument("--kernels", action="store_true", help="compare numba kernels with PyTorch operations")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--processor-time", action="store_true", help="measure CPU time, for a busy machine")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(time.process_time if args.processor_time else time.perf_counter)
        return 0
    if args.kernels:
        args.losses = ",".join((*TOPK, *NOISED))
        args.targets = "labels"
        args.shapes = "256x1000"
    losses, rows = args.losses.split(","), []
    flags = ["--processor-time"] if args.processor_time else []
    with (
        worker(Path(sys.executable), args.threads, "auto", *flags) as this,
        worker(
            args.against or Path(sys.executable), args.threads, "torch" if args.kernels else "auto", *flags
        ) as other,
    ):
        subjects = {"this": this} | ({"against": other} if args.against or args.kernels else {})
        print(f"{'loss':24} {'target':10} {'shape':>10} {'time':>13} {'x CE':>6} {'bound':>6}  x against")
        for shape in (tuple(map(int, one.split("x"))) for one in args.shapes.split(",")):
            for target in args.targets.split(","):
                table = measure(subjects, losses, target, shape, args.dtype, args.rounds)
                for row in rows_of(table, target, shape):
                    print(shown(row), flush=True)
                    rows.append(row)
    if args.json:
        environment = {
            "processor": platform.processor() or platform.machine(),
            "threads": args.threads,
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
        }
        from topk_registry.files import write_text  # not at the top: --against may run an older package

        write_text(args.json, json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
