"""A line of progress on a terminal."""

from typing import TextIO


class Progress:
    """One line on a terminal with the step that runs; nothing elsewhere."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.total, self.done, self.stream = total, 0, stream

    def __call__(self, step: str) -> None:
        """Show that a step begins."""
        self.at(self.done + 1, step)

    def at(self, done: int, step: str) -> None:
        """Show a number of steps and a word for them."""
        if self.stream.isatty() and (done != self.done or not done):
            print(f"\r\x1b[K[{done}/{self.total}] {step} ...", end="", file=self.stream, flush=True)
        self.done = done

    def clear(self) -> None:
        """Take the line away."""
        if self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream, flush=True)
