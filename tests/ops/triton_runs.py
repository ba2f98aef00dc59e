"""Running Triton's kernels without a GPU: by its interpreter, or as far as the compiler takes them.

The interpreter must be asked for before triton is imported, and other tests want a triton that compiles. So the tests
of a module of kernel tests are skipped, but for one that runs the module again in a process of its own.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interprets = pytest.mark.skipif(not INTERPRETED, reason="runs under the interpreter, in another process")
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")


def pass_under_the_interpreter(file: str, marks: str) -> None:
    """Run the tests in a file with these marks again, in a process in which Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, file]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout), run.stdout


def replace_once() -> None:
    """Let the interpreter put its own functions into Triton's language now, for good.

    It would do so at each start of a kernel and at each call of a device function, which is a third of its time.
    """
    interpreter, language = import_module("triton.runtime.interpreter"), import_module("triton.language")
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    if scope is not None:  # older ones restore nothing
        scope._changes.clear()
    interpreter._patch_lang = lambda kernel: scope


def compute_results_alone() -> None:
    """Leave out sums in int64 beside those in int32: they are looked at in Triton's debug mode only.

    The numpy type of a Triton type is remembered, which each constant asks for.
    """
    interpreter = import_module("triton.runtime.interpreter")
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    look_up, found = interpreter._get_np_dtype, {}

    def numpy_type(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = numpy_type


def supply_bf16() -> None:
    """Let the interpreter make numbers in bfloat16, which that of triton 3.8 cannot."""
    builder = import_module("triton.runtime.interpreter").InterpreterBuilder
    bf16 = import_module("triton.language").bfloat16
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), bf16)


if INTERPRETED and find_spec("triton") is not None:
    replace_once()
    compute_results_alone()
    supply_bf16()


@dataclass(frozen=True)
class Compiled:
    name: str
    registers: int
    stack: int  # bytes a thread: what did not fit into registers
    file: Path  # the machine code


class Launches:
    """Records what is launched instead of launching it, to compile it for a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.jit import JITFunction

        self.recorded = []
        record = self.recorded.append
        monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: record((kernel, args, options)))

    def compiled(self, capability: int, directory: Path) -> list[Compiled]:
        return [compile_for(*launch, capability, directory) for launch in self.recorded]


def compile_for(kernel, args, options, capability: int, directory: Path) -> Compiled:
    """Compile a launch for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
    signature = {name: "constexpr" if name in constants else _type(given[name]) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(signature.values()) if type.startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    chosen = {name: options[name] for name in ("num_warps", "enable_fp_fusion")}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    file = directory / f"{kernel.__name__}.cubin"
    file.write_bytes(binary.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file], capture_output=True, text=True, check=True
    )
    (registers,), (stack,) = (re.findall(rf"{what}:(\d+)", usage.stdout) for what in ("REG", "STACK"))
    return Compiled(kernel.__name__, int(registers), int(stack), file)


def _type(argument) -> str:
    if isinstance(argument, torch.Tensor):
        names = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return "*" + (names | {torch.int64: "i64", torch.int32: "i32", torch.int8: "i8"})[argument.dtype]
    return "i32" if isinstance(argument, int) else "fp32"
