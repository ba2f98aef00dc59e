"""Ctrl-C, SIGTERM and a closed terminal ask a run to stop after the update that is under way."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from topk_studies.old_trainer.setup.workers import SIGNALS

SAME_REQUEST = 1.0  # seconds: one request may come twice, from the sender and through the process group


class StopRequest:
    """A context manager that notes the first signal in ``signum``, and puts the old handlers back.

    A second Ctrl-C stops at once. Other repeated signals change nothing: ``timeout``, batch systems and torchrun send
    SIGTERM to a process and again to its group, and end with SIGKILL what does not stop.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._came = 0.0
        self._old: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum != 0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            # a signal that is ignored stays so: nohup, and the background jobs of a shell
            heard = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
            self._old = {signum: signal.signal(signum, self._note) for signum in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._came = signum, time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._came > SAME_REQUEST:
            raise KeyboardInterrupt
