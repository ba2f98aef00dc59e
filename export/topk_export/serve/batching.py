"""Dynamic batching: requests that arrive together are run together."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from topk_export.runtime.metadata import NO_GROUP


class OverloadedError(RuntimeError):
    """The queue is full, or the server is shutting down."""


class _Waiting(NamedTuple):
    x: np.ndarray
    group: int | None
    since: float
    answer: "asyncio.Future[dict[str, np.ndarray]]"


class Batcher:
    """Collects inputs into batches and hands each caller its own row of the outputs.

    A batch starts when it is full, or ``max_delay`` seconds after its first input came. One batch runs at a time, in a
    thread, while the next one fills. An input beyond ``max_queue`` raises :class:`OverloadedError` at once.

    Args:
        run: maps a batch [B, ...] to outputs by name, each [B, ...]. A second argument is the number of each input's
            group [B]; it is left out where no input of the batch has one.
        max_batch: the most inputs in a batch.
        max_delay: the most seconds that an input waits for others to share its batch.
        max_queue: the most inputs that may wait.
        on_batch: called with the size of each batch as it starts.
        on_run: called after a run, with the seconds that each of its inputs had waited, and those that it took.
    """

    def __init__(
        self,
        run: Callable[..., dict[str, np.ndarray]],
        *,
        max_batch: int = 16,
        max_delay: float = 0.005,
        max_queue: int = 128,
        on_batch: Callable[[int], None] = lambda size: None,
        on_run: Callable[[list[float], float], None] = lambda waited, seconds: None,
    ) -> None:
        self._run, self._max_batch, self._max_delay = run, max_batch, max_delay
        self._on_batch, self._on_run = on_batch, on_run
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
        """Stop; calls that still wait raise :class:`OverloadedError`."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        _fail(self._queue, _closing())
        self._queue.clear()
        await asyncio.to_thread(self._thread.shutdown)

    async def __call__(self, x: np.ndarray, group: int | None = None) -> dict[str, np.ndarray]:
        """Run one input [1, ...] in a batch with others, and return its own outputs by name, each [1, ...].

        Args:
            x: the input.
            group: the number of its group, in a file with thresholds by group.
        """
        if self._task is None:
            raise _closing()
        if len(self._queue) >= self._max_queue:
            raise OverloadedError(f"{self._max_queue} requests are waiting already")
        loop = asyncio.get_running_loop()
        item = _Waiting(x, group, loop.time(), loop.create_future())
        self._queue.append(item)
        self._news.set()
        return await item.answer

    async def _work(self) -> None:
        while True:
            if batch := await self._next():
                self._on_batch(len(batch))
                await self._answer(batch)

    async def _next(self) -> list[_Waiting]:
        """Wait for the next batch, without inputs whose callers have gone; until then they count as waiting."""
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
        joined, loop = (np.concatenate([item.x for item in batch]), *_groups(batch)), asyncio.get_running_loop()
        start = loop.time()
        try:
            outputs = await loop.run_in_executor(self._thread, self._run, *joined)
        except asyncio.CancelledError:
            _fail(batch, _closing())
            raise
        except Exception as error:
            _fail(batch, error)
            return
        self._on_run([start - item.since for item in batch], loop.time() - start)
        for i, item in enumerate(batch):
            if not item.answer.done():
                item.answer.set_result({name: value[i : i + 1] for name, value in outputs.items()})


class WarmUp:
    """Run the model once in the background, as its first run allocates memory and may compile kernels."""

    def __init__(self, batcher: Batcher, x: np.ndarray) -> None:
        self._batcher, self._x = batcher, x
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._batcher(self._x))

    async def finish(self) -> None:
        """Wait for the run, and raise RuntimeError if it failed."""
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
        """Return why requests cannot be answered, or None if they can."""
        if self._task is None:
            return "the server is shutting down"
        if not self._task.done():
            return "the model is warming up"
        error = self._task.exception()
        return None if error is None else f"the model does not run: {error}"


def _groups(batch: Iterable[_Waiting]) -> tuple[np.ndarray, ...]:
    """The number of each input's group [B], as the arguments of a run: none where no input has one."""
    numbers = [item.group for item in batch]
    if all(number is None for number in numbers):
        return ()
    return (np.array([NO_GROUP if number is None else number for number in numbers], np.int64),)


def _closing() -> OverloadedError:
    return OverloadedError("the server is shutting down")


def _fail(items: Iterable[_Waiting], error: Exception) -> None:
    for item in items:
        if not item.answer.done():
            item.answer.set_exception(error)
