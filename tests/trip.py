"""Print the files whose functions a call enters, by their first call.

``python -m tests.trip ROOT ARGUMENTS`` runs a command of ours; :func:`files_of` traces any function. Code that only
runs as a file is imported does not count.
"""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def files_of(root: str, call: Callable[[], Any]) -> tuple[list[str], Any]:
    """Call a function, and return the files under ``root`` that it enters, and its result."""
    found, result = entrances(root, call)
    return list(dict.fromkeys(file for _, file in found)), result


def entrances(root: str, call: Callable[[], Any]) -> tuple[list[tuple[str, str]], Any]:
    """Call a function, and return (caller, file) of each entrance into a file under ``root``, and its result.

    The caller is the file under ``root`` that the call comes from, through libraries or not; "" for none.
    """
    found: list[tuple[str, str]] = []

    def is_ours(file: str) -> bool:
        return file.startswith(root) and "site-packages" not in file and file != __file__

    def caller(frame: FrameType | None) -> str:
        while frame is not None:
            file = frame.f_code.co_filename
            if is_ours(file):
                return file
            frame = frame.f_back
        return ""

    def imported(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(root):
                return frame.f_code.co_filename != __file__
            frame = frame.f_back
        return False

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and is_ours(file):
            is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
            if is_function and not imported(frame) and (origin := caller(frame.f_back)) != file:
                found.append((origin.removeprefix(root).lstrip("/"), file.removeprefix(root).lstrip("/")))

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return found, result


def main(root: str, argv: list[str]) -> None:
    """Run a command, and print the files that it enters."""
    from topk_registry.cli import main as command

    files, status = files_of(root, lambda: command.main(argv))
    print("\n".join(["", *files]))
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
