"""Workers of a run's loaders: they ignore the signals that stop a run, and end with its process."""

import os
import signal
import threading
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


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
