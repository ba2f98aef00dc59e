"""A line of progress: on a terminal the step that runs, in a log a line now and then."""

import time
from collections.abc import Callable
from typing import TextIO

INTERVAL = 20.0  # seconds between two lines of a log; quicker work leaves none


class Progress:
    """One line on a terminal with the step that runs; elsewhere a line of its own every 20 seconds.

    Args:
        total: the number of steps; it may be told with each of them instead.
        stream: where the line is written.
        clock: gives seconds.
    """

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.stream, self.clock = total, stream, clock
        self.done, self.line, self.said = 0, "", clock()

    def __call__(self, step: str) -> None:
        """Show that a step begins."""
        self.at(self.done + 1, step)

    def at(self, done: int, step: str, total: int | None = None) -> None:
        """Show a number of steps and a word for them; where the line shows both already, nothing is written."""
        self.total = self.total if total is None else total
        line = f"[{done}/{self.total}] {step} ..."
        if line != self.line:
            if self.stream.isatty():
                print(f"\r\x1b[K{line}", end="", file=self.stream, flush=True)
            elif self.clock() - self.said >= INTERVAL:
                print(line, file=self.stream, flush=True)
                self.said = self.clock()
        self.done, self.line = done, line

    def clear(self) -> None:
        """Take the line away from a terminal."""
        self.line = ""
        if self.stream.isatty():
            print("\r\x1b[K", end="", file=self.stream, flush=True)
