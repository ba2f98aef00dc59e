"""Which GPU kernels a step of ours and of cross-entropy runs, and how long each takes.

    python -m tests.gpu.profile --device cuda --output FILE

With ``--once`` each step runs once after one that compiles: for a profiler that reads the counters.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.bench.operators import GPU_SHAPES, OPERATORS
from tests.bench.report import aligned
from topk_studies.timing.contest import CROSS_ENTROPY, OURS, Case

STEPS = 10


def steps(device: str, quick: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Steps with the titles of their cases."""
    shapes = ((8, 50, 3),) if quick else GPU_SHAPES
    contestants = [one for one in OPERATORS["ksubset"].contestants(None) if one.name in (CROSS_ENTROPY, OURS)]
    for shape, dtype, mixup in product(shapes, (torch.float32, torch.bfloat16), (0.0, 0.3)):
        case = Case(*shape, {"tau": 1.0, "mixup": mixup}, device, dtype)
        for one in contestants:
            loss, (logits, target) = one.build(case), case.inputs()

            def step(loss=loss, logits=logits, target=target) -> None:
                loss(logits, target).backward()
                logits.grad = None

            yield f"{one.name}, {case.title}", step


def kernels(step: Callable[[], None], device: str) -> list[tuple[str, float]]:
    """Names of the kernels, and microseconds of each in one step; of operators on the CPU."""
    gpu = device.startswith("cuda")
    step()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
        if gpu:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    rows = [one for one in found.key_averages() if one.device_type == kind]
    times = [(one.key, (one.self_device_time_total if gpu else one.self_cpu_time_total) / STEPS) for one in rows]
    return sorted(times, key=lambda row: -row[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.profile", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the terminal")
    parser.add_argument("--once", action="store_true", help="run each step twice and profile nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny shape")
    args = parser.parse_args(argv)
    output = args.output.open("w", encoding="utf-8") if args.output else sys.stdout
    for title, step in steps(args.device, args.quick):
        if args.once:
            step()
            step()
            continue
        rows = [("kernel", "us a step"), *((name[:90], f"{us:.1f}") for name, us in kernels(step, args.device))]
        print("\n".join([title, *aligned(rows), ""]), file=output, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
