"""Ctrl-C, SIGTERM and a closed terminal ask a run to stop after the update that is under way."""

import os
import signal
import threading
import time
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
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


def leave_to_the_run(worker: int, over: Connection, then: Any = None) -> None:
    """Ignore the signals in a loader's worker, which goes on until the run has saved; then initialise as ``then``.

    Args:
        over: ``end_of_process()`` of the process that holds the loader. The worker ends with it, for that process waits
            for it: something may still hold the loader there, such as the traceback of an error in a notebook.
    """
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(over,), daemon=True).start()
    if then is not None:
        then(worker)


def _end_with(over: Connection) -> None:
    over.poll(None)  # nobody takes the message: all workers see it
    os._exit(0)


def end_of_process() -> Connection:
    """Connection that has a message to read as soon as this process exits."""
    return _end_of(os.getpid())


@cache
def _end_of(process: int) -> Connection:  # a forked process has an end of its own
    reader, writer = Pipe(duplex=False)
    Finalize(None, writer.send_bytes, (b"end",), exitpriority=0)  # before multiprocessing waits for the workers
    return reader
