"""An executor over a fixed number of workers: a queue of calls, and a thread that waits for each worker."""

import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class Worker(Protocol):
    """A process somewhere that does one call at a time, started when it is first needed and again after it died."""

    def call(self, task: Call) -> Any:
        """Do a call; raise its error, or :class:`~topk_registry.executors.errors.WorkerDiedError`."""
        ...

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the call under way, if there is one."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


class PoolExecutor(Executor):
    """Does calls by workers; a worker that dies takes its own call with it and is replaced.

    Args:
        workers: the workers.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Call] | None] = queue.SimpleQueue()
        self.workers: list[Worker] = list(workers)
        self._threads = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in self.workers]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if self._closed:
            raise RuntimeError("the executor was shut down")
        future: Future[Any] = Future()
        self._calls.put((future, (fn, args, kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes once their calls are done.

        With ``cancel_futures``, calls that wait are cancelled and those under way are interrupted (SIGINT), so that
        they can save their state.
        """
        self._closed = True
        if cancel_futures:
            self.interrupt()
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def interrupt(self) -> None:
        """Cancel the calls that wait, and interrupt those under way."""
        self._cancel()
        for worker in self.workers:
            worker.interrupt()

    def kill(self) -> None:
        """End the processes now."""
        self._closed = True
        self._cancel()
        for worker in self.workers:
            worker.close()
            self._calls.put(None)

    def _cancel(self) -> None:
        try:
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call[0].cancel()
        except queue.Empty:
            pass

    def _serve(self, worker: Worker) -> None:
        while (call := self._calls.get()) is not None:
            future, task = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(worker.call(task))
                except BaseException as error:
                    future.set_exception(error)
        worker.close()


def answer(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """Do a call in a worker's main thread: whether it ended well, and its value or its error, interrupts too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return True, fn(*args, **kwargs)
    except BaseException as error:
        return False, error
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
