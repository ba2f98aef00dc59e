"""Decode images in threads, large ones apart from small ones, so that a few of them do not hold up all others."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from topk_export.runtime.predictor import Predictor
from topk_export.runtime.preprocess import count_pixels
from topk_export.serve.batching import OverloadedError

LARGE = 4_000_000  # pixels: a tenth of a second of decoding and resizing
Result = TypeVar("Result")


class Lane:
    """Threads with a bounded queue.

    Args:
        name: of its work, for the error.
        threads: how many calls run at a time.
        waiting: how many more may wait; beyond it :class:`OverloadedError` is raised at once.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name, self._room = name, threads + waiting
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._count, self._lock = 0, threading.Lock()

    async def __call__(self, function: Callable[..., Result], *args: Any) -> Result:
        with self._lock:
            if self._count >= self._room:
                raise OverloadedError(f"{self._room} calls wait for {self._name} already")
            self._count += 1
        future = self._pool.submit(function, *args)
        # a call that is given up keeps its place until its thread is free again
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _done(self, future: Future[Any]) -> None:
        with self._lock:
            self._count -= 1


class Decoder:
    """Encoded images to inputs of the model.

    Args:
        predictor: knows the transform.
        threads: for small images; half as many more are kept for large ones.
        waiting: small images that may wait; a quarter as many large ones.
    """

    def __init__(self, predictor: Predictor, threads: int, waiting: int) -> None:
        self._predictor = predictor
        self._small = Lane("decoding", threads, waiting)
        self._large = Lane("decoding of large images", max(1, threads // 2), max(1, waiting // 4))

    async def __call__(self, body: bytes) -> np.ndarray:
        """Return the input [1, ...] of one encoded image."""
        decoded = await self._small(self._if_small, body)
        return await self._large(self._decode, body) if decoded is None else decoded

    def _if_small(self, body: bytes) -> np.ndarray | None:
        if count_pixels(body, max_pixels=self._predictor.max_pixels) > LARGE:
            return None
        return self._decode(body)

    def _decode(self, body: bytes) -> np.ndarray:
        return self._predictor.preprocess([body])

    def stop(self) -> None:
        self._small.stop()
        self._large.stop()
