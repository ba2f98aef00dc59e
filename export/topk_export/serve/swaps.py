"""Bring new contents of a model's files into all processes of a running service at once."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from topk_export.serve.releases import Release, Releases

Step = Literal["prepare", "hold", "switch", "drop"]  # methods of Service
LOOK = 1.0  # seconds between two looks at files that are watched


class Swaps:
    """Decide when a new release is due, and swap it in.

    Args:
        releases: of the model; its current one is served.
        ask: let all processes take a step with a release, and return what went wrong.
        tell: take a line for whoever runs the service.
        watch: look at the files by itself; otherwise only a signal makes a release due.
    """

    def __init__(
        self,
        releases: Releases,
        ask: Callable[[Step, Release], list[str]],
        tell: Callable[[str], None],
        *,
        watch: bool,
    ) -> None:
        self._releases, self._ask, self._tell, self._watch = releases, ask, tell, watch
        self._asked = threading.Event()
        self._last, self._looked = releases.seen, time.monotonic()

    @contextlib.contextmanager
    def on_signal(self) -> Iterator[None]:
        """Let SIGHUP ask for a swap."""
        hangup = getattr(signal, "SIGHUP", None)  # not on Windows
        if hangup is None:
            yield
            return
        before = signal.signal(hangup, lambda *_: self._asked.set())
        try:
            yield
        finally:
            signal.signal(hangup, before)

    def look(self) -> None:
        """Swap where a signal asked for it, or where watched files have changed and are no longer being written."""
        if self._asked.is_set():
            self._asked.clear()
            self.swap()
        elif self._watch and time.monotonic() - self._looked >= LOOK:
            before, self._last, self._looked = self._last, self._releases.stamps(), time.monotonic()
            if self._last is not None and before == self._last != self._releases.seen:
                self.swap()

    def swap(self) -> None:
        """Serve the files as they are now; where they cannot be served, go on as before and say why."""
        current = self._releases.current
        assert current is not None
        try:
            new = self._releases.read()
        except (OSError, ValueError) as error:
            self._tell(f"error: {error}; version {current.version} goes on")
            return
        if new is None:
            self._tell(f"the model's content is the same; version {current.version} goes on")
            return
        if problems := self._ask("prepare", new):
            self._ask("drop", new)
            self._releases.keep(current)
            self._tell(f"error: {problems[0]}; version {current.version} goes on")
            return
        self._ask("hold", new)
        self._releases.keep(new)
        self._ask("switch", new)
        self._tell(f"serving version {new.version}, SHA-256 {new.sha256}")
