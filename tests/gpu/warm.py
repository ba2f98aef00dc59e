"""Compile the kernels of all cases of the benchmarks, in many processes at once: Triton keeps them on disk.

    python -m tests.gpu.warm --device cuda            those of operators and losses
    python -m tests.gpu.warm --device cuda --steps    those of the losses in training steps

One process would take its time for half an hour of compiling, on one of sixteen processors.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from tests.bench import steps
from tests.bench.operators import GPU_SHAPES, OPERATORS
from tests.bench.operators.losses import names_of_ours
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_studies.timing.contest import CROSS_ENTROPY, OURS, Case

DTYPES = (torch.float32, torch.bfloat16)
MIXED = (0.0, 0.3)
CLASSES = 1000  # of training steps
SHORTENED = 64  # rows are enough to compile a kernel: their number is no constant of it
Task = tuple[str, str, Case]


def tasks(device: str, quick: bool) -> list[Task]:
    """One for each contestant of ours and each case, the conditions of the measurement left out."""
    shapes = ((8, 50, 3),) if quick else GPU_SHAPES
    found = []
    for (B, n, k), dtype, mixup in product(shapes, DTYPES[:1] if quick else DTYPES, MIXED):
        for name, operator in OPERATORS.items():
            case = Case(min(B, SHORTENED), n, k, {**operator.options[-1], "mixup": mixup}, device, dtype)
            for one in operator.contestants(None):
                wanted = one.name == OURS if name != "losses" else CROSS_ENTROPY not in one.name
                if wanted and one.takes_part(case) and not (quick and name == "losses" and one.name != "focal"):
                    found.append((name, one.name, case))
    return found


def compile_one(task: Task) -> str:
    """Run a contestant once, forward and backward; what went wrong, or ""."""
    operator, name, case = task
    try:
        build = next(one.build for one in OPERATORS[operator].contestants(None) if one.name == name)
        logits, target = case.inputs()
        build(case)(logits, target).backward()
    except Exception as error:  # the benchmark tells of it in its table
        return f"{operator}, {name}, {case.title}: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def compile_step(name: str, device: str) -> str:
    """Run a loss as a training step does, on mixed and smoothed labels in half precision; what went wrong, or ""."""
    label = torch.arange(SHORTENED, device=device)
    logits = torch.zeros(len(label), CLASSES, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        loss, mixtures = steps.criterion(name, CLASSES)
        target = LabelMixture.mixed(label, label.flip(0), steps.LAM, steps.SMOOTHING)
        loss.to(device)(logits, target if mixtures else target.dense(CLASSES)).backward()
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.warm", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2), metavar="N")
    parser.add_argument("--quick", action="store_true", help="one tiny case")
    parser.add_argument("--steps", action="store_true", help="the losses of training steps instead")
    args = parser.parse_args(argv)
    names = names_of_ours()[: 2 if args.quick else None]
    if args.steps:
        compile_all, wanted = compile_step, [(name, args.device) for name in names]
    else:
        compile_all, wanted = compile_one, [(task,) for task in tasks(args.device, args.quick)]
    pool: Any = ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    with pool:
        running = [pool.submit(compile_all, *task) for task in wanted]
        for done in tqdm(as_completed(running), "compiled", len(running), disable=None):
            if told := done.result():
                print(told, file=sys.stderr)
    print(f"{len(wanted)} cases compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
