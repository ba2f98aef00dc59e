"""Machine instructions that Triton kernels execute for each score of a row, without a GPU.

Kernels are compiled for a GPU that need not be there, and the instructions of their machine code are counted. Each
counts as often as a warp executes it: as many times as the loop around it has rounds, not at all where only rows with a
top group come, and for a share of the tiles where only those come that hold the label or an end of the row. Of kernels
that are started for such rows alone the instructions count that tell them from others.
"""

import argparse
import ast
import linecache
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import topk_registry as tr
from tests.ops.triton_runs import Launches, compile_for
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset.chunked.layer import problem
from topk_registry.ops.ksubset.chunked.soft_targets import Costs
from topk_registry.ops.ksubset.torch.all_classes import Common
from topk_registry.ops.ksubset.torch.rows import finish
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Options

CASES = ((8192, 1000, 5), (1024, 21_841, 5), (8192, 1000, 10), (8192, 1000, 20), (8192, 1000, 50), (16_384, 100, 5))
CAPABILITIES = (80, 90)
TARGET = 35
SEARCH = {"search_row", "search_target", "take_place"}  # what only rows with a top group, or with a new best, execute
EDGES = ("masked", "store_masked", "masked_masses")  # what only tiles with the label or an end of the row execute
TARGETS = ("indices", "smoothing", "mixup", "distribution", "chunk", "chunk-smoothing")
ROW_LOSSES = (
    "logit_adjustment",
    "focal",
    "sigmoid_mse",
    "mirror",
    "log_taylor_softmax",
    "spherical_bound",
    "topk_hinge",
)
OVER_A_CHUNK = ("extend_state", "sum_costs")  # kernels whose programs go over all of its classes
ROW_TARGETS = ("indices", "smoothing", "mixup", "distribution")


@dataclass(frozen=True)
class Instruction:
    text: str
    functions: frozenset[str]  # those it was inlined from


@dataclass(frozen=True)
class Count:
    kernel: str
    executed: float  # by all threads of a program, for each score of its rows
    registers: int
    stack: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench instructions", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES, help="80, 90, ...")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS, help="kinds of targets")
    losses = ("smooth_topk_svm", *ROW_LOSSES)
    parser.add_argument("--losses", nargs="+", default=losses, choices=losses)
    parser.add_argument("--largest-k", type=int, help="count the kernels in passes beyond this k (default: 10)")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    if "smooth_topk_svm" in args.losses:
        _print_smooth_svm(args, dtype)
    row_losses = [name for name in args.losses if name in ROW_LOSSES]
    if row_losses:
        print("| loss | target | n | for sm | instructions a score | registers | stack |\n" + "|---" * 7 + "|")
    targets = [target for target in args.targets if target in ROW_TARGETS]
    sizes = [n for _, n, k in CASES if k == CASES[0][2]]  # these losses have no k
    for name, target in product(row_losses, targets):
        for n, capability in product(sizes, args.capability):
            one = count_rows(name, n, dtype, capability, target)
            place = f"{name} | {target} | {n} | {capability}"
            print(f"| {place} | {one.executed:.1f} | {one.registers} | {one.stack} |", flush=True)
    return 0


def _print_smooth_svm(args: argparse.Namespace, dtype: torch.dtype) -> None:
    print("| target | B, n, k | for sm | kernel | instructions a score | registers | stack |\n" + "|---" * 7 + "|")
    for target, case, capability in product(args.targets, CASES, args.capability):
        counts = count(*case, dtype, capability, target, args.largest_k)
        name = f"{target} | {', '.join(map(str, case))} | {capability}"
        for one in counts:
            print(f"| {name} | {one.kernel} | {one.executed:.1f} | {one.registers} | {one.stack} |", flush=True)
        if len(counts) > 1:
            print(f"| {name} | all | {sum(one.executed for one in counts):.1f} | | |")
    print(
        f"\nThe target at (8192, 1000, 5) and (1024, 21841, 5) in bfloat16 is {TARGET}, on flat rows.", file=sys.stderr
    )


def count(
    B: int, n: int, k: int, dtype: torch.dtype, capability: int, target: str = "indices", largest_k: int | None = None
) -> list[Count]:
    """Count for the loss of flat rows and its gradient; torch operations between kernels in passes are left out."""
    from triton import knobs

    from topk_registry.ops.ksubset.triton import backend, chunks

    s, label = torch.zeros(8, n, dtype=dtype), torch.zeros(8, dtype=torch.long)  # B decides nothing but the grid
    kinds = {"smoothing": LabelMixture.smoothed(label, 0.1), "mixup": LabelMixture.mixed(label, label, 0.7)}
    q = (kinds | {"distribution": torch.zeros(8, n)}).get(target, label)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        launches = Launches(patch)
        patch.setattr(knobs.compilation, "always_compile", True)  # with the lines of these very files
        if largest_k is not None:
            patch.setattr(backend, "ONE_KERNEL_LARGEST_K", largest_k)
        if target == "chunk-smoothing":  # of classes, as linear_smooth_topk has them; its state is that of k + 1
            launch_targets(s.float(), LabelMixture.smoothed(label, 0.1), k)
        elif target == "chunk":
            state, _ = chunks.extend(None, None, s.float(), label, k, float(k))
            chunks.gradient(s.float(), label, finish(state, float(k)), float(k), torch.ones(8))
        else:
            backend.expected_hinges(s, q, k, float(k), Hinge(torch.ones(()), 1 / k, 1.0), None, 1 / B)
        return [_count(launch, n, capability, Path(directory)) for launch in launches.recorded]


def launch_targets(s: torch.Tensor, target: torch.Tensor | LabelMixture, k: int) -> None:
    """Launch what computes the hinges of a target on a chunk of scores, and their gradient."""
    from topk_registry.ops.ksubset.triton import chunks

    (B, n), T = s.shape, 2 * k + 3
    f = Common(torch.zeros(B, T), torch.zeros(k + 1, B), torch.zeros(B), torch.zeros(B))
    costs, p = Costs(torch.zeros(()), None, 1.0, k), problem(s[:0], n, k, 1.0, None, n, torch.float32)
    kernels = chunks.OfTargets(target, costs, f, torch.zeros(B, T), torch.zeros(B, T, dtype=torch.long), p)
    kernels.add_costs(torch.zeros(B, 2 + k + T, dtype=torch.float64), s, 0)
    kernels.slopes(s, 0, torch.zeros(B), torch.zeros(B, T), torch.zeros(k, B))


def count_rows(name: str, n: int, dtype: torch.dtype, capability: int, target: str) -> Count:
    """Count for a loss of one of the families of row losses, from the logits to its gradient, and not their sum."""
    from triton import knobs

    builder = tr.get_loss_builder(name)
    context = {"num_classes": n, "class_counts": [max(1, 500 // (c + 1)) for c in range(n)]}
    loss: Any = builder(**tr.accepted_context(builder, context))
    rows = loss.row_loss(torch.zeros(1, n))
    kernel = rows.on_gpu()
    label = torch.zeros(8, dtype=torch.long)
    q = {"mixup": LabelMixture.mixed(label, label, 0.7, 0.1), "distribution": torch.zeros(8, n)}.get(target, label)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        launches = Launches(patch)
        patch.setattr(knobs.compilation, "always_compile", True)
        options = Options(q, None, 0.1 * (target == "smoothing"), -100, 1)
        kernel.run(rows.own, options, torch.zeros(8, n, dtype=dtype), True)
        return _count(launches.recorded[0], n, capability, Path(directory))


def _count(launch, n: int, capability: int, directory: Path) -> Count:
    kernel, args, options = launch
    compiled = compile_for(kernel, args, options, capability, directory)
    numbers = dict(zip(kernel.arg_names, args, strict=False)) | options
    instructions, branches = disassemble(compiled.file)
    if numbers.get("SKIPS"):
        leaves = next(place for place, one in enumerate(instructions) if one.text.endswith("EXIT"))
        instructions, branches = instructions[: leaves + 1], []
    searches = [bool(SEARCH & one.functions) for one in instructions]
    # a way back over the search is no loop: it returns from what the compiler has moved behind it
    loops = [(to, place) for place, to in branches if to < place and not any(searches[to : place + 1])]
    edges = [(place, to) for place, to in branches if _is_of_edges(instructions[place + 1 : to])]
    tiles = numbers.get("TILES", 1)
    at_edges = min(1.0, _edge_tiles(n, numbers) / tiles)
    executed = 0.0
    for place, one in enumerate(instructions):
        if searches[place]:
            continue
        rare = one.functions & set(EDGES) or any(first < place < last for first, last in edges)
        weight = at_edges if rare else 1.0
        for first, last in loops:
            if first <= place <= last:
                outer = any(first <= start and end < last for start, end in loops)
                weight *= _rounds(kernel.__name__, numbers, outer)
        executed += weight
    scores = n if "TILES" in numbers or kernel.__name__ in OVER_A_CHUNK else min(n, numbers.get("N", n))
    if kernel.__name__.startswith("solve_"):
        scores = n
    scores *= numbers.get("R", 1)
    return Count(kernel.__name__, executed * 32 * options["num_warps"] / scores, compiled.registers, compiled.stack)


def _edge_tiles(n: int, numbers: dict) -> float:
    """How many tiles of a row hold an end of it, or the label wherever it is."""
    if "TILES" not in numbers or numbers["R"] > 1:
        return 1e9
    ends = (n % numbers["N"] > 0) + (n % numbers["VECTOR"] > 0)
    return ends + 1 - ends / numbers["TILES"]


def _rounds(kernel: str, numbers: dict, outer: bool) -> int:
    if kernel == "selection_rows":
        at_label = numbers["M"] == 1 and not numbers["EVEN"]
        selected = numbers["k"] - at_label  # after the first one; at a label it is left out
        return selected if outer or numbers["HELD"] else numbers["TILES"]
    if "TILES" in numbers:
        return numbers["TILES"] // 2  # two tiles a round, and one behind the loop
    if kernel in OVER_A_CHUNK:
        return -(-numbers["n"] // numbers["N"])
    of_group, of_powers = numbers.get("T", 1), numbers.get("k", 1)
    return of_group if kernel == "select" or kernel.startswith("solve_") else of_powers


def disassemble(file: Path) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """The instructions of a compiled kernel, and its branches from place to place."""
    from triton import knobs

    tool = knobs.nvidia.nvdisasm.path
    text = subprocess.run([tool, "-c", "-gi", file], capture_output=True, text=True, check=True).stdout
    instructions, labels, chain, open_chain = [], {}, [], False
    for line in text.splitlines():
        if where := re.search(r'//## File "([^"]+)", line (\d+)(?: inlined at "([^"]+)", line (\d+))?', line):
            chain = chain if open_chain else []
            open_chain = True
            chain += [pair for pair in (where.group(1, 2), where.group(3, 4)) if pair[0]]
        elif label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            open_chain = False
            functions = frozenset(_function(file, int(number)) for file, number in chain)
            instructions.append(Instruction(found[1].rstrip(), functions))
    return instructions, list(_branches(instructions, labels))


def _branches(instructions: list[Instruction], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Branches from place to place. Those behind the kernel's last exit return from slow paths."""
    end = max((i for i, one in enumerate(instructions) if one.text.endswith("EXIT")), default=len(instructions))
    for place, one in enumerate(instructions[:end]):
        branch = re.search(r"BRA.*\((\.L_x_\d+)\)", one.text)
        if branch and labels[branch[1]] != place:
            yield place, labels[branch[1]]


def _is_of_edges(skipped: list[Instruction]) -> bool:
    """Whether most of what a branch jumps over is for edges: then so is the rest of it, such as copies of registers."""
    return 2 * sum(bool(one.functions & set(EDGES)) for one in skipped) > len(skipped)


def _function(file: str, line: int) -> str:
    return next((name for name, first, last in _functions(file) if first <= line <= last), "")


@cache
def _functions(file: str) -> list[tuple[str, int, int]]:
    found = ast.walk(ast.parse("".join(linecache.getlines(file))))
    return [(node.name, node.lineno, node.end_lineno or 0) for node in found if isinstance(node, ast.FunctionDef)]
