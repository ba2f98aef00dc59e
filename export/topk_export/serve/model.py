"""One release of the model at work: decoding, batching, and the first run."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from topk_export.runtime.predictor import Predictor
from topk_export.serve.batching import Batcher, WarmUp
from topk_export.serve.decoding import Decoder
from topk_export.serve.limits import Limits
from topk_export.serve.metrics import Metrics
from topk_export.serve.releases import Release


class ServedModel:
    """A loaded release, with threads that work for it."""

    def __init__(self, predictor: Predictor, release: Release, limits: Limits, metrics: Metrics) -> None:
        self.predictor, self.release = predictor, release
        self._metrics = metrics
        self.batcher = Batcher(
            predictor.run,
            max_batch=limits.batch,
            max_delay=limits.delay_seconds,
            max_queue=limits.queue * limits.images,
            on_batch=metrics.batches.observe,
            on_run=lambda waited, seconds: metrics.ran(release, waited, seconds, time.time()),
        )
        self.decoder = Decoder(predictor, limits.decoders, limits.queue * limits.images)
        blank = np.zeros((1, *predictor.input_shape), predictor.input_type)
        self._warm_up = WarmUp(self.batcher, blank)
        self._users, self._unused = 0, asyncio.Event()

    async def start(self, *, warm: bool) -> None:
        """Begin to work; with ``warm`` return once the model has run, or raise RuntimeError where it does not."""
        self.batcher.start()
        self._warm_up.start()
        if warm:
            await self._warm_up.finish()

    async def stop(self) -> None:
        await self._warm_up.stop()
        await self.batcher.stop()
        await asyncio.to_thread(self.decoder.stop)

    async def retire(self) -> None:
        """Stop once the last request that it answers has ended."""
        while self._users:
            self._unused.clear()
            await self._unused.wait()
        await self.stop()

    def problem(self) -> str | None:
        """Return why requests cannot be answered, or None if they can."""
        return self._warm_up.problem()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count a request that this model answers, and the time that it takes."""
        start, outcome = time.perf_counter(), "fail"
        self._users += 1
        try:
            yield
            outcome = "success"
        finally:
            self._users -= 1
            self._unused.set()
            self._metrics.turns.labels(str(self.release.version), outcome).observe(time.perf_counter() - start)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of a stage of a request."""
        start = time.perf_counter()
        yield
        self._metrics.stages.labels(str(self.release.version), name).observe(time.perf_counter() - start)
