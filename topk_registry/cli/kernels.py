"""``topk-registry kernels``: where compiled kernels for the CPU come from, and a library of them for a wheel."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from topk_registry import registry
from topk_registry.cli import INTERRUPTED, ArgumentParser
from topk_registry.registry.discovery import OURS as DISTRIBUTION
from topk_registry.registry.discovery import installed_version


def main(argv: Sequence[str]) -> int:
    """Show where compiled CPU kernels come from, or build a library of them."""
    parser = ArgumentParser(
        prog="topk-registry kernels",
        description="Show where the compiled kernels for the CPU come from: the library of the installation, or numba. "
        "With build, compile the kernels of every loss of topk-registry into a library that needs neither numba nor "
        "Python. It takes some minutes, and a C compiler.",
    )
    parser.add_argument(
        "action", nargs="?", choices=["show", "build"], default="show", help="show (the default) or build"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="with build: the library to write")
    parser.add_argument(
        "--levels", metavar="LEVEL,...", help="with build: levels of the processor, the best first, such as x86-64-v4"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="with build: keep what is compiled here, and go on from it; default: FILE.parts beside the library",
    )
    args = parser.parse_args(argv)
    if args.action == "show":
        if args.output or args.levels or args.folder:
            parser.error("--output, --levels and --folder are options of build")
        return _show()
    if args.output is None:
        parser.error("build needs --output FILE")
    levels = tuple(filter(None, (args.levels or "").split(",")))
    return _build(args.output, levels, args.folder or args.output.with_name(f"{args.output.name}.parts"))


def _show() -> int:
    library = import_module("topk_registry.ops.cpu.library").library()
    if library.why:
        print(f"library: none ({library.why})")
    else:
        print(f"library: {library.path}, for {library.level}")
    version = installed_version("numba")
    print(f"numba: {version or 'not installed'}")
    if library.why and not version:
        print("torch operations serve; pip install numba for compiled kernels")
    return 0


def _build(path: Path, levels: tuple[str, ...], folder: Path) -> int:
    try:
        building = import_module("topk_registry.ops.rows.building")
    except ImportError as error:
        print(f"topk-registry kernels build: needs numba ({error}): pip install numba", file=sys.stderr)
        return 1

    def say(done: int, count: int) -> None:
        print(f"[{done}/{count}] kernels", file=sys.stderr)

    try:
        building.build(path, curves(), levels, folder=folder, say=say)
    except building.BuildError as error:
        print(f"topk-registry kernels build: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; what is compiled stays in {folder}, and the next build goes on from it", file=sys.stderr)
        return INTERRUPTED
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def curves() -> Iterator[Any]:
    """The compiled curves of the losses of topk-registry, at every value of their options that chooses another."""
    torch, curve = import_module("torch"), import_module("topk_registry.ops.rows.curve")
    subject_of = import_module("topk_registry.testing.subject").Subject.of
    rows: list[Any] = []
    for info in registry.losses.infos():
        if info.distribution == DISTRIBUTION and info.status == "available":
            rows += _row_losses(subject_of(info.name))
    for one in rows:
        kernel = one.kernel() if one is not None and one.kernel is not None else None
        functions = getattr(kernel, "functions", None)
        if functions is not None:
            with curve.collecting() as collected:
                for dtype in (torch.float32, torch.float64):
                    functions(dtype, False)
            yield from collected


def _row_losses(subject: Any) -> Iterator[Any]:
    """What the loss is made from, with every two options at other values, small and large ones among them."""
    with import_module("topk_registry.ops.backend").use_backend("torch"):  # nothing is compiled to find values
        values = list(import_module("topk_registry.testing.options").other_values(subject))
    parameters = inspect.signature(subject.factory).parameters.values()
    values += [(p.name, p.default * by) for p in parameters if isinstance(p.default, float) for by in (1e-3, 1e3)]
    for (first, value), (second, other) in combinations_with_replacement(values, 2):
        try:
            loss = subject.build(**{first: value, second: other})
            yield loss.row_loss(subject.logits()) if hasattr(loss, "row_loss") else None
        except (ValueError, TypeError):  # values that do not go together
            continue
