"""An executor over a fixed number of workers: a queue of calls, and a thread that waits for each worker."""

import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from types import FrameType
from typing import Any, Protocol

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class Worker(Protocol):
    """A process somewhere that does one call at a time, started when it is first needed and again after it died."""

    def call(self, task: Call, stopped: Callable[[], bool]) -> Any:
        """Do a call; raise its error, or :class:`~topk_studies.old_trainer.executors.errors.WorkerDiedError`.

        Args:
            task: the call.
            stopped: tells whether the call was interrupted before ``interrupt`` could reach it.
        """
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
        self._calls: queue.SimpleQueue[tuple[Future[Any], Call, int] | None] = queue.SimpleQueue()
        self._interrupts = 0
        self.workers: list[Worker] = list(workers)
        self._threads = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in self.workers]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        if self._closed:
            raise RuntimeError("the executor was shut down")
        future: Future[Any] = Future()
        self._calls.put((future, (fn, args, kwargs), self._interrupts))
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
        self._interrupts += 1  # first: a call that no worker runs yet is told of it as it begins
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
            future, task, before = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(worker.call(task, lambda before=before: self._interrupts != before))
                except BaseException as error:
                    future.set_exception(error)
        worker.close()


class Interruptible:
    """Calls in a worker's main thread, which an interrupt reaches wherever they are.

    Whoever interrupts a call waits until ``ready`` has returned; from then on no interrupt is lost.
    """

    def __init__(self) -> None:
        self._runs = False
        self._came = False

    def ready(self) -> None:
        """Keep interrupts for the next call; one that came too late for the call before is forgotten."""
        signal.signal(signal.SIGINT, self._note)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._came = False

    def answer(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Do a call: whether it ended well, and its value or its error, interrupts too."""
        try:
            try:
                self._runs = True
                if self._came:
                    raise KeyboardInterrupt
                return True, fn(*args, **kwargs)
            finally:
                self._runs = False
        except BaseException as error:
            return False, error

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._came = True
        if self._runs:
            self._runs = False  # one is enough: another could come outside of the call
            raise KeyboardInterrupt


def answer(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """Do one call in a process of its own."""
    call = Interruptible()
    call.ready()
    return call.answer(fn, args, kwargs)
