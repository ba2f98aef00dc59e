"""Ctrl-C and SIGTERM as a request to stop after the step that is under way; a second one stops at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context manager that notes the first signal in ``signum`` and puts the old handlers back."""

    def __init__(self) -> None:
        self.signum = 0
        self._old: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum != 0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._old = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for each in SIGNALS:
            signal.signal(each, signal.default_int_handler)
