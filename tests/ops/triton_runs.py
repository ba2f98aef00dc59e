"""Running Triton's kernels without a GPU: by its interpreter.

The interpreter must be asked for before triton is imported, and other tests want a triton that compiles. So the tests
of a module of kernel tests are skipped, but for one that runs the module again in a process of its own.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import needs

needs.package("triton")

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


if INTERPRETED:
    replace_once()
    compute_results_alone()
    supply_bf16()
