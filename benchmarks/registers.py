"""Compile the Triton kernels for GPUs that need not be there, and write the registers and the memory of each kernel.

    python -m benchmarks.registers --output docs/results/registers.json
    python -m benchmarks.registers --output docs/results/registers.json --targets gfx942    # replaces one target

The kernels are those of the self-tests (``self-test``), and those of usual calls with k = 5. A compilation takes
seconds for each kernel and target, and no GPU.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from topk_registry.files import write_text
from topk_registry.ops.gpu import arithmetic
from topk_registry.ops.gpu.scale import scale
from topk_registry.ops.ksubset.triton import backend
from topk_registry.ops.masses import Masses
from topk_registry.ops.perturbed.triton import kth

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100, 120)}
TARGETS |= {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx1100": GPUTarget("hip", "gfx1100", 32)}
TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TYPES |= {torch.int64: "*i64"}
ON_AMD = {
    "registers": "vgpr_count",
    "spilled registers": "vgpr_spill_count",
    "stack": "private_segment_fixed_size",
    "shared memory": "group_segment_fixed_size",
}

Launch = tuple[Any, tuple[Any, ...], Mapping[str, Any]]  # kernel, arguments, options


def masses_of(kind: str, n: int) -> Masses:
    labels, shares = torch.arange(3)[:, None], torch.ones(3, 1, dtype=torch.float64)
    if kind == "mixture":
        return Masses(labels.expand(3, 2), shares.expand(3, 2), None, None)
    if kind == "distribution":
        return Masses(None, None, None, torch.ones(3, n))
    return Masses(labels, shares, None if kind == "labels" else 0.1 / n * shares[:, 0], None)


def calls() -> dict[str, Callable[[], object]]:
    """Return one function per kernel that launches the kernel."""

    def smooth_topk(kind: str, n: int, k: int, dtype: torch.dtype) -> Callable[[], object]:
        one = torch.ones(())
        return lambda: backend.losses(torch.zeros(3, n, dtype=dtype), masses_of(kind, n), k, 0.25, one)

    made: dict[str, Callable[[], object]] = {}
    for kind in ("labels", "smoothed labels"):
        made[f"smooth_topk, {kind}, self-test"] = smooth_topk(kind, 13, 2, torch.float32)
        made[f"smooth_topk, {kind}, 21,841 classes, bfloat16"] = smooth_topk(kind, 21_841, 5, torch.bfloat16)
    for kind in ("labels", "smoothed labels", "mixture", "distribution"):
        made[f"smooth_topk, {kind}, 1000 classes"] = smooth_topk(kind, 1000, 5, torch.float32)
    made["perturbed_topk, 1000 classes"] = lambda: kth(torch.zeros(3, 1000), torch.tensor(0), 6, 1.0, 5)
    made["scale of a gradient"] = lambda: scale(torch.zeros(3, 1000), torch.tensor(1.0))
    return made


def launch_of(call: Callable[[], object]) -> Launch:
    """Return the launch of a kernel within ``call``, without the launch itself."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    # on a GPU, a number alpha is passed by value
    by_value = patch.object(backend, "_gap", lambda alpha, n, device: (float(alpha), 0))
    with patch.object(JITFunction, "run", record), by_value:
        call()
    (launch,) = launches
    return launch


def compiled(launch: Launch, target: GPUTarget) -> Any:
    """Compile the kernel of a launch for a GPU, and return Triton's compiled kernel."""
    kernel, args, options = launch
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
    signature = {name: "constexpr" if name in constants else _type(given[name]) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    chosen = {name: options[name] for name in ("num_warps", "enable_fp_fusion") if name in options}
    with _instructions_of(target):
        return triton.compile(source, target=target, options=chosen)


@contextmanager
def _instructions_of(target: GPUTarget) -> Iterator[None]:
    with patch.object(arithmetic, "PTX", tl.constexpr(target.backend == "cuda")):
        yield


def _type(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "i32" if isinstance(argument, int) else "fp32"


def usage(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """Return the registers per thread, the bytes of stack per thread, and the bytes of shared memory per program."""
    binary = compiled(launch, target)
    result = {"kernel": launch[0].__name__, "warps": launch[2]["num_warps"]}
    if target.backend == "hip":
        found = {name: re.findall(rf"\.{key}:\s*(\d+)", binary.asm["amdgcn"]) for name, key in ON_AMD.items()}
        return result | {name: int(values[-1]) for name, values in found.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,), (stack,) = (re.findall(rf"{what}:(\d+)", text) for what in ("REG", "STACK"))
    return result | {"registers": int(registers), "stack": int(stack), "shared memory": binary.metadata.shared}


def main(arguments: list[str] | None = None) -> int:
    """Compile all kernels for the targets, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args(arguments)
    launches = {name: launch_of(call) for name, call in calls().items()}
    for target in options.targets:
        table = {name: usage(launch, TARGETS[target]) for name, launch in launches.items()}
        known = json.loads(options.output.read_text())["targets"] if options.output.exists() else {}
        results = {name: known[name] if name != target else table for name in TARGETS if name in {*known, target}}
        command = "python -m benchmarks.registers --output docs/results/registers.json"
        content = {"command": command, "triton": triton.__version__, "targets": results}
        write_text(options.output, json.dumps(content, indent=1) + "\n")
        print(f"{target}: {len(table)} kernels", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
