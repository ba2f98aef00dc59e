"""A line of progress on a terminal."""

from typing import TextIO


class Progress:
    """One line on a terminal with the step that runs; nothing elsewhere."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.total, self.done, self.stream = total, 0, stream

    def __call__(self, step: str) -> None:
        """Show that a step begins."""
        self.done += 1
        if self.stream.isatty():
            print(f"\r\x1b[K[{self.done}/{self.total}] {step} ...", end="", file=self.stream, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream, flush=True)
