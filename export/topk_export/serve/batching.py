"""Dynamic batching: requests that arrive together are run together."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np


class OverloadedError(RuntimeError):
    """No room for another input, or the server is shutting down."""


class _Waiting(NamedTuple):
    x: np.ndarray
    since: float
    answer: "asyncio.Future[dict[str, np.ndarray]]"


class Batcher:
    """Collects inputs into batches and hands each caller its own row of the outputs.

    A batch leaves when it is full, or ``max_delay`` seconds after its first input came. One batch runs at a time, in a
    thread, while the next one gathers. The queue is bounded: beyond it :class:`OverloadedError` is raised at once.

    Args:
        run: a batch [B, ...] to outputs by name [B, ...].
        max_batch: inputs a batch.
        max_delay: seconds to wait for company.
        max_queue: inputs that may wait.
        on_batch: told the size of each batch.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray], dict[str, np.ndarray]],
        *,
        max_batch: int = 16,
        max_delay: float = 0.005,
        max_queue: int = 128,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._run, self._max_batch, self._max_delay, self._on_batch = run, max_batch, max_delay, on_batch
        self._queue: deque[_Waiting] = deque()
        self._max_queue = max_queue
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop; whoever still waits is told."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        _fail(self._queue, _closing())
        self._queue.clear()
        await asyncio.to_thread(self._thread.shutdown)

    async def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs of one input [1, ...], each [1, ...]."""
        if self._task is None:
            raise _closing()
        if len(self._queue) >= self._max_queue:
            raise OverloadedError(f"{self._max_queue} requests are waiting already")
        loop = asyncio.get_running_loop()
        item = _Waiting(x, loop.time(), loop.create_future())
        self._queue.append(item)
        self._news.set()
        return await item.answer

    async def _work(self) -> None:
        while True:
            if batch := await self._next():
                self._on_batch(len(batch))
                await self._answer(batch)

    async def _next(self) -> list[_Waiting]:
        """The next batch without those whose callers have gone; inputs stay in the queue until it leaves."""
        await self._arrived(1)
        left = self._queue[0].since + self._max_delay - asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived(self._max_batch), max(left, 0.0))
        batch = [self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))]
        return [item for item in batch if not item.answer.done()]

    async def _arrived(self, count: int) -> None:
        while len(self._queue) < count:
            self._news.clear()
            await self._news.wait()

    async def _answer(self, batch: list[_Waiting]) -> None:
        joined = np.concatenate([item.x for item in batch])
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, joined)
        except asyncio.CancelledError:
            _fail(batch, _closing())
            raise
        except Exception as error:
            _fail(batch, error)
            return
        for i, item in enumerate(batch):
            if not item.answer.done():
                item.answer.set_result({name: value[i : i + 1] for name, value in outputs.items()})


class WarmUp:
    """A first run of the model, in the background: it allocates, and on a GPU may compile."""

    def __init__(self, batcher: Batcher, x: np.ndarray) -> None:
        self._batcher, self._x = batcher, x
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._batcher(self._x))

    async def finish(self) -> None:
        """Wait for the run, and raise RuntimeError where the model does not run."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if problem := self.problem():
            raise RuntimeError(problem)

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def problem(self) -> str | None:
        """Why no image can be looked at, or None."""
        if self._task is None:
            return "the server is shutting down"
        if not self._task.done():
            return "the model is warming up"
        error = self._task.exception()
        return None if error is None else f"the model does not run: {error}"


def _closing() -> OverloadedError:
    return OverloadedError("the server is shutting down")


def _fail(items: Iterable[_Waiting], error: Exception) -> None:
    for item in items:
        if not item.answer.done():
            item.answer.set_exception(error)
