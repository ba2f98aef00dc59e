"""Dynamic batching: requests that arrive together are run together."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class OverloadedError(RuntimeError):
    """The queue is full."""


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
        self._queue: asyncio.Queue[tuple[np.ndarray, asyncio.Future[Any]]] = asyncio.Queue(max_queue)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop; whoever still waits is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while not self._queue.empty():
            _settle(self._queue.get_nowait()[1], error=OverloadedError("the server is shutting down"))
        self._thread.shutdown()

    async def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs of one input [1, ...], each [1, ...]."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((x, future))
        except asyncio.QueueFull:
            raise OverloadedError(f"{self._queue.maxsize} requests are waiting already") from None
        return await future

    async def _work(self) -> None:
        while True:
            batch = [await self._queue.get()]
            try:
                await self._gather(batch)
                await self._answer([item for item in batch if not item[1].done()])
            except asyncio.CancelledError:
                for _, future in batch:
                    _settle(future, error=OverloadedError("the server is shutting down"))
                raise

    async def _gather(self, batch: list[Any]) -> None:
        end = asyncio.get_running_loop().time() + self._max_delay
        while len(batch) < self._max_batch:
            try:
                batch.append(self._queue.get_nowait())
                continue
            except asyncio.QueueEmpty:
                left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), left))
            except TimeoutError:
                return
            except asyncio.TimeoutError:
                return

    async def _answer(self, batch: list[Any]) -> None:
        if not batch:
            return
        self._on_batch(len(batch))
        joined = np.concatenate([x for x, _ in batch])
        try:
            outputs = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, joined)
        except Exception as error:
            for _, future in batch:
                _settle(future, error=error)
            return
        for i, (_, future) in enumerate(batch):
            _settle(future, {name: value[i : i + 1] for name, value in outputs.items()})


def _settle(future: "asyncio.Future[Any]", value: Any = None, *, error: Exception | None = None) -> None:
    if future.done():  # its caller has gone
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
