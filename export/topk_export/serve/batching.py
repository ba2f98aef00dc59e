"""Dynamic batching: one run of the model processes images of several requests."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import Prediction, rank_rows

Row = np.ndarray | dict[str, np.ndarray]  # inputs of the model for one image, or one array per input, by name


@dataclass(frozen=True)
class _Item:
    x: Row
    mask: np.ndarray | None
    alpha: float | None
    answer: "asyncio.Future[Prediction]"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Items of one kind fit into one run of the model: the same alpha, and arrays of the same shapes."""
        arrays = self.x if isinstance(self.x, dict) else {"": self.x}
        return self.alpha, [array.shape for array in arrays.values()]


class Batcher:
    """Queue that collects images of several callers into batches, and gives each caller the prediction for its image.

    ``await batcher(x)`` returns the prediction for one image. While one batch runs in a thread, new images wait in the
    queue.

    Args:
        predictor: the model.
        max_batch: maximum number of images per batch.
        max_set: maximum number of classes that a prediction lists in ``set``.
        on_batch: function that is called before each batch, with the number of images in the batch.
    """

    def __init__(
        self, predictor: Predictor, max_batch: int, max_set: int, on_batch: Callable[[int], Any] = lambda size: None
    ) -> None:
        self._predictor, self._max_batch, self._max_set, self._on_batch = predictor, max_batch, max_set, on_batch
        self._queue: deque[_Item] = deque()
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inference")
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop the thread. The server first waits for all requests, so that the queue is empty."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    async def __call__(self, x: Row, mask: np.ndarray | None = None, alpha: float | None = None) -> Prediction:
        """Put one image into the queue, and return the prediction for the image.

        ``x`` is the input of the model for this image, without the batch axis, or one such array per input. ``mask`` is
        the mask of the allowed classes, bool [n]. If ``mask`` is None, all classes are allowed. If ``alpha`` is None,
        the prediction set uses the alpha of the calibration.
        """
        item = _Item(x, mask, alpha, asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self._news.set()
        return await item.answer

    async def _work(self) -> None:
        while True:
            while not self._queue:
                self._news.clear()
                await self._news.wait()
            batch = self._next()
            if not batch:
                continue
            self._on_batch(len(batch))
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, batch)
            for item, result in zip(batch, results, strict=True):
                if item.answer.done():  # the caller timed out
                    continue
                if isinstance(result, Exception):
                    item.answer.set_exception(result)
                else:
                    item.answer.set_result(result)

    def _next(self) -> list[_Item]:
        batch: list[_Item] = []
        rest: list[_Item] = []
        for item in self._queue:
            if item.answer.done():  # no caller waits for this image
                continue
            fits = len(batch) < self._max_batch and (not batch or item.kind == batch[0].kind)
            (batch if fits else rest).append(item)
        self._queue = deque(rest)
        return batch

    def _run(self, batch: list[_Item]) -> list[Any]:
        try:
            return self._predict(batch)
        except Exception as error:  # errors of onnxruntime share no base class
            if len(batch) == 1:
                return [error]
            return [result for item in batch for result in self._run([item])]  # the error may concern one item only

    def _predict(self, batch: list[_Item]) -> list[Any]:
        masks = None
        if any(item.mask is not None for item in batch):
            n = self._predictor.metadata.num_classes
            masks = np.stack([np.ones(n, bool) if item.mask is None else item.mask for item in batch])
        outputs = self._predictor.run(_stacked([item.x for item in batch]), allowed=masks, alpha=batch[0].alpha)
        return list(rank_rows(outputs, self._predictor.metadata, allowed=masks, max_set=self._max_set))


def _stacked(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return np.stack(rows)
