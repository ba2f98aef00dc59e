"""Time and bytes of a training step of one head, whole in one process and with its classes spread over ranks.

``python -m tests.bench.class_parallel --classes 20000 --features 64 --batch 64 --ranks 2``. Both take a batch of one
size: all of it in one process, or its parts on the ranks, on the CPU over gloo with one thread each. Bytes of a
rank are those that it is given by gathering and exchanging, its own among them, and those that it gives to be reduced.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from topk_registry.functional import linear_smooth_topk
from topk_registry.ops.ksubset.chunked.parallel import layout

COLLECTIVES = {  # the place of what is sent among a function's arguments; some have an older name too
    "all_gather_single": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_single": 1,
    "reduce_scatter_tensor": 1,
    "all_reduce": 0,
    "all_to_all_single": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="rows of all ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--smoothing", type=float, default=0.0, help="label smoothing, the path of distributions")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    found = {ranks: _measured(ranks, args) for ranks in (1, args.ranks)}
    whole, spread = found[1], found[args.ranks]
    seconds = [result["seconds"] for result in (whole, spread)]
    print(json.dumps({"whole": whole, "spread": spread, "seconds whole / spread": seconds[0] / seconds[1]}, indent=1))


def _measured(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=_rank, args=(rank, ranks, folder, args)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        with open(f"{folder}/result") as file:
            return json.load(file)


def _rank(rank: int, ranks: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    rows, m = layout(args.batch, ranks)[rank], layout(args.classes, ranks)[rank]
    features, weight = (torch.randn(size, args.features, requires_grad=True) for size in (rows, m))
    target = torch.randint(args.classes, (rows,))
    options = {"k": args.k, "label_smoothing": args.smoothing, "num_classes": args.classes}

    def step(sent: Counter | None = None) -> None:
        features.grad = weight.grad = None
        group = dist.group.WORLD if ranks > 1 else None
        with ExitStack() as stack:
            if sent is not None:
                for name, place in COLLECTIVES.items():
                    if not hasattr(dist, name):
                        continue
                    stack.enter_context(mock.patch.object(dist, name, _counted(name, place, sent)))
            linear_smooth_topk(features, weight, None, target, process_group=group, **options).backward()

    sent = Counter()
    step(sent)
    seconds = []
    for _ in range(args.steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        with open(f"{folder}/result", "w") as file:
            json.dump({"ranks": ranks, "seconds": statistics.median(seconds), "bytes": sent}, file)
    dist.destroy_process_group()


def _counted(name: str, place: int, sent: Counter) -> Any:
    real = getattr(dist, name)

    def collective(*args: Any, **options: Any) -> Any:
        sent[name] += args[place].nbytes
        return real(*args, **options)

    return collective


if __name__ == "__main__":
    main()
