"""Build a library of compiled kernels, see library.py: numba's code for each level of the processor, and a shim in C.

Each level is compiled in processes of its own, ``python -m topk_registry.ops.rows.building LEVEL DTYPE FOLDER``, with
the curves and symbols as JSON on their standard input: numba decides on the processor when it is imported. A kernel
calls nothing but the C library: what would raise an exception of Python ends the process with a message.
"""
# pyright: reportAttributeAccessIssue=false

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from topk_registry.ops.cpu.functions import ENTRIES, PRECISIONS, Entry
from topk_registry.ops.cpu.library import OPERATORS, VARIABLE, edition, exported
from topk_registry.ops.cpu.linking import code_of
from topk_registry.ops.rows.curve import Compiled

X86 = "x86-64-v4", "x86-64-v3"  # the best first
Say = Callable[[int, int], None]
SHIM = OPERATORS / "cpu" / "shim.c"
OPTIMISED = 3
C_TYPES = {"void*": "ptr", "int64": "i64", "float64": "double"}
# what kernels may need that is not in the library
OF_C = {
    "abort", "free", "malloc", "memcpy", "memmove", "memset", "fprintf", "fputs", "fwrite", "stderr", "__stderrp",
    "exp", "exp2", "expm1", "floor", "fmod", "frexp", "hypot", "ldexp", "log", "log1p", "log2", "pow", "sqrt",
    "expf", "exp2f", "expm1f", "floorf", "logf", "log1pf", "log2f", "powf", "sqrtf",
    "__cpu_indicator_init", "__cpu_model", "__cpu_features2", "__stack_chk_fail",
}  # fmt: skip


class BuildError(RuntimeError):
    """The library could not be built."""


def levels_here() -> tuple[str, ...]:
    """The levels that are built for processors like this one."""
    return X86 if platform.machine().lower() in ("x86_64", "amd64") else ("generic",)


def build(
    path: Path,
    curves: Iterable[Compiled],
    levels: Sequence[str] = (),
    *,
    folder: Path,
    only: Sequence[str] = (),
    say: Say = lambda *_: None,
) -> Path:
    """Build a library of all entries and of these curves.

    Args:
        path: the file to write.
        curves: those of the losses that it is to serve, in any order.
        levels: of the processor, the best first; none for all levels of processors like this one.
        folder: keeps the compiled entries, so that a build that was interrupted goes on from there.
        only: the symbols of the entries to build; none for all.
        say: is told how many entries are compiled, of how many.

    Returns:
        The path.
    """
    levels, curves = tuple(levels) or levels_here(), sorted(set(curves), key=lambda one: one.symbol)
    folder = folder / f"{edition():08x}"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(level, dtype) for level in levels for dtype in (torch.float64, torch.float32)]
    wanted = [
        _object(folder, level, entry.symbol(one)) for level, dtype in jobs for entry, one in _all(curves, dtype, only)
    ]
    given, running, failed = json.dumps({"curves": [_spec(one) for one in curves], "only": list(only)}), {}, []
    try:
        while jobs or running:
            while jobs and len(running) < (os.cpu_count() or 1):
                level, dtype = jobs.pop(0)
                running[_worker(level, dtype, folder, given)] = f"{level} in {dtype}"
            time.sleep(0.2)
            say(sum(one.exists() for one in wanted), len(wanted))
            for one in [one for one in running if one.poll() is not None]:
                name = running.pop(one)
                failed += [name] if one.returncode else []
    finally:
        for one in running:
            one.terminate()
            one.wait()
    if failed:
        raise BuildError(f"kernels for {', '.join(failed)} could not be compiled; what went wrong is said above")
    linked = folder / f"linked{os.getpid()}"
    try:
        _link(wanted, levels, linked)
        if foreign := sorted(_undefined(linked) - OF_C):
            raise BuildError(f"the library would need {', '.join(foreign)}, which the C library does not have")
        path.parent.mkdir(parents=True, exist_ok=True)
        ready = path.with_name(f"{path.name}.{os.getpid()}")
        shutil.copyfile(linked, ready)
        ready.replace(path)  # a process may have loaded the one before
    finally:
        linked.unlink(missing_ok=True)
    return path


def _worker(level: str, dtype: torch.dtype, folder: Path, curves: str) -> subprocess.Popen:
    """Start a process that compiles the entries of one level and precision."""
    environment = {
        **os.environ, "NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": "", "PYTHONHASHSEED": "0", VARIABLE: "compile",
    }  # fmt: skip
    command = [sys.executable, "-m", __name__, level, str(dtype).removeprefix("torch."), str(folder)]
    one = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)
    assert one.stdin is not None
    with suppress(BrokenPipeError):  # it failed, and its status says so
        one.stdin.write(curves)
        one.stdin.close()
    return one


def _object(folder: Path, level: str, symbol: str) -> Path:
    return folder / f"{level}-{symbol}.o"


def _spec(one: Compiled) -> tuple[str, str, bool, bool, str]:
    return one.curve.__module__, one.curve.__qualname__, one.others, one.softmax, str(one.dtype).removeprefix("torch.")


def _of_spec(module: str, name: str, others: bool, softmax: bool, dtype: str) -> Compiled:
    return Compiled(reduce(getattr, name.split("."), import_module(module)), others, softmax, getattr(torch, dtype))


def _link(objects: Sequence[Path], levels: Sequence[str], path: Path) -> None:
    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    numbers = ", ".join((re.findall(r"v(\d)$", level) or ["0"])[0] for level in levels)
    strip = ["-Wl,-x"] if sys.platform == "darwin" else ["-Wl,--build-id=none", "-Wl,-s", "-Wl,--gc-sections"]
    command = [
        compiler, "-O2", "-shared", "-fPIC", "-fvisibility=hidden", *strip, "-o", str(path), "-x", "c", str(SHIM),
        f"-DTOPK_EDITION={edition()}ull", f'-DTOPK_LEVELS="{" ".join(levels)}"',
        f"-DTOPK_NUMBERS=((const int[]){{{numbers}}})", "-x", "none", *map(str, objects), "-lm",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise BuildError(f"{compiler} could not link the library:\n{ran.stderr}")


def _undefined(path: Path) -> set[str]:
    """The names that a library needs from others."""
    flags = ["-u"] if sys.platform == "darwin" else ["-D", "--undefined-only"]
    ran = subprocess.run(["nm", *flags, str(path)], capture_output=True, text=True)
    if ran.returncode:
        raise BuildError(f"nm cannot read the library:\n{ran.stderr}")
    strong = [line.split()[-1] for line in ran.stdout.splitlines() if line.split()[:1] != ["w"]]
    return {name.split("@")[0].removeprefix("_" if sys.platform == "darwin" else "") for name in strong}


def main(level: str, dtype: str, folder: str) -> None:
    """Compile the entries of one precision for the processor that the environment names, to one object file each."""
    given = json.load(sys.stdin)
    curves = [_of_spec(*one) for one in given["curves"]]
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=level, features="", opt=OPTIMISED, reloc="pic", codemodel="default")
    for entry, one in _all(curves, getattr(torch, dtype), given["only"]):
        path, name = _object(Path(folder), level, entry.symbol(one)), exported(level, entry.symbol(one))
        if path.exists():
            continue
        module = _module(entry, one, name)
        for part in (*module.functions, *module.global_variables):
            if not part.is_declaration and part.name != name:
                part.linkage = "internal"
        manager = binding.create_new_module_pass_manager()
        manager.add_global_dead_code_eliminate_pass()
        manager.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
        module.verify()
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(machine.emit_object(module))
        unfinished.replace(path)


def _all(curves: Iterable[Compiled], dtype: torch.dtype, only: Sequence[str]) -> Iterator[tuple[Entry, torch.dtype]]:
    """Every entry that computes in this precision, in an order that does not change."""
    for file in sorted(OPERATORS.glob("*/numba/*.py")):
        import_module(f"topk_registry.ops.{file.parts[-3]}.numba.{file.stem}")
    of_curve, real = import_module("topk_registry.ops.rows.numba.curves").of_curve, PRECISIONS[dtype].real
    for entry in (*ENTRIES, *(of_curve(one) for one in curves)):
        for one in entry.dtypes:
            if PRECISIONS[one].real is real and (not only or entry.symbol(one) in only):
                yield entry, one


def _module(entry: Entry, dtype: torch.dtype, name: str) -> Any:
    """The code of an entry, with a C function of this name that calls it."""
    arguments, result = normalize_signature(entry.kind.signature)
    compiled = CFunc(entry.make(PRECISIONS[dtype]), (arguments, result), locals={}, options=entry.options)
    code, native = code_of(compiled)
    module = binding.parse_assembly(code)
    kinds = [C_TYPES[str(kind)] for kind in arguments]
    given = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(kinds))
    returned = "double" if str(result) == "float64" else "void"
    load = "%value = load double, ptr %result\n  ret double %value" if returned == "double" else "ret void"
    text = f"{name} raised an exception"
    module.link_in(
        binding.parse_assembly(f"""
            target triple = "{module.triple}"
            @message = internal constant [{len(text) + 1} x i8] c"{text}\\00"
            declare i32 @"{native}"(ptr, ptr, {", ".join(kinds)})
            declare void @topk_failed(ptr)
            define {returned} @"{name}"({given}) {{
              %result = alloca double
              %exception = alloca ptr
              %status = call i32 @"{native}"(ptr %result, ptr %exception, {given})
              %done = icmp eq i32 %status, 0
              %none = icmp eq i32 %status, -2
              %right = or i1 %done, %none
              br i1 %right, label %good, label %bad
            bad:
              call void @topk_failed(ptr @message)
              br label %good
            good:
              {load}
            }}
        """)
    )
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
