"""A line of progress on a terminal."""

from typing import TextIO


class Progress:
    """One line on a terminal with the step that runs; nothing elsewhere."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.total, self.done, self.stream, self.line = total, 0, stream, ""

    def __call__(self, step: str) -> None:
        """Show that a step begins."""
        self.at(self.done + 1, step)

    def at(self, done: int, step: str) -> None:
        """Show a number of steps and a word for them; where the line shows both already, nothing is written."""
        line = f"[{done}/{self.total}] {step} ..."
        if self.stream.isatty() and line != self.line:
            print(f"\r\x1b[K{line}", end="", file=self.stream, flush=True)
        self.done, self.line = done, line

    def clear(self) -> None:
        """Take the line away."""
        self.line = ""
        if self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream, flush=True)
