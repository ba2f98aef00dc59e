"""Run a command of ours by ``python -m tests.trip ROOT ARGUMENTS``, and print the files whose functions it enters.

Files are listed by their first call. Code that only runs as a file is imported does not count.
"""

import inspect
import sys
from types import FrameType
from typing import Any


def main(root: str, argv: list[str]) -> None:
    entered: dict[str, None] = {}

    def imported(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(root):
                return frame.f_code.co_filename != __file__
            frame = frame.f_back
        return False

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(root) and file not in entered and file != __file__:
            is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
            if is_function and not imported(frame):
                entered[file] = None

    from topk_registry.cli import main as command

    sys.setprofile(note)
    try:
        status = command.main(argv)
    finally:
        sys.setprofile(None)
    print("\n".join(["", *(file.removeprefix(root).lstrip("/") for file in entered)]))
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
