"""Compile the kernels of every loss for the CPU beforehand: ``topk-registry doctor --warm``."""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from topk_registry import registry
from topk_registry.cli.parser import INTERRUPTED
from topk_registry.cli.progress import Progress
from topk_registry.testing.subject import BATCH, Subject, value_and_gradient

CLASSES = 12  # of the scores that the operators are called with


def warm(names: Sequence[str] | None = None, *, double: bool = False) -> int:
    """Call losses once, forward and backward, with targets of every kind; return the exit status.

    Args:
        names: of losses; None for all that are not timm's, and for the operators.
        double: whether to compile for float64 too, beside float32.
    """
    torch = import_module("torch")
    precisions = [torch.float32, torch.float64] if double else [torch.float32]
    losses = [info.name for info in registry.losses.infos() if info.status == "available"] if names is None else names
    steps = [(f"{name}, {str(one).removeprefix('torch.')}", _loss(name, one)) for one in precisions for name in losses]
    if names is None:
        steps += [(f"operators, {str(one).removeprefix('torch.')}", _operators(one)) for one in precisions]
    progress, begin, problems = Progress(len(steps), sys.stderr), time.monotonic(), []
    try:
        for name, step in steps:
            progress(name)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # where kernels cannot be used or kept is told at the end
                    step()
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__}: {error}")
        problems += _unusable()
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted; what is compiled stays{_where()}, and the next --warm goes on from it", file=sys.stderr)
        return INTERRUPTED
    progress.clear()
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(steps)} calls in {time.monotonic() - begin:.1f} s; compiled kernels are kept{_where() or ' nowhere'}")
    return 1 if problems else 0


def _loss(name: str, dtype: Any) -> Callable[[], None]:
    def step() -> None:
        subject = Subject.of(name)
        loss, logits = subject.build(), subject.logits(dtype=dtype)
        for _, target in subject.targets(loss):
            value_and_gradient(loss, logits, target)

    return step


def _operators(dtype: Any) -> Callable[[], None]:
    def step() -> None:
        torch, functional = import_module("torch"), import_module("topk_registry.functional")
        for operator in (functional.topk_margins, functional.topk_marginals, functional.perturbed_topk):
            scores = torch.linspace(-1, 1, BATCH * CLASSES, dtype=dtype).view(BATCH, CLASSES).requires_grad_()
            operator(scores, 3).sum().backward()

    return step


def _unusable() -> list[str]:
    """Operators whose kernels do not serve on the CPU, and kernels that could not be kept."""
    problems = [
        f"{record.operator}: kernels do not serve on the CPU: {record.why}"
        for record in import_module("topk_registry.ops.backend").report()
        if record.device == "cpu" and record.backend != "numba"
    ]
    if why := _compiling("problem"):
        problems.append(f"compiled kernels cannot be kept ({why}): set NUMBA_CACHE_DIR to a folder that can be written")
    return problems


def _where() -> str:
    library = import_module("topk_registry.ops.cpu.library").library()
    folder = _compiling("folder") if library.why else library.path
    return f" in {folder}" if folder else ""


def _compiling(what: str) -> str:
    """What the compiler of kernels tells, "" where it was not loaded."""
    module = sys.modules.get("topk_registry.ops.cpu.compiling")
    return getattr(module, what)() if module else ""
