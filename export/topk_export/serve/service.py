"""One model at work for many requests: decoding, batching, ranking, and their readiness."""

import asyncio

import numpy as np
from fastapi import HTTPException
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import ValueClass

from topk_export.errors import ImageError, ImageTooLargeError, PredictionError
from topk_export.runtime.predictor import Predictor
from topk_export.serve.answers import encode, ranking
from topk_export.serve.batching import Batcher, OverloadedError, WarmUp
from topk_export.serve.decoding import Decoder, Lane
from topk_export.serve.guard import AGAIN
from topk_export.serve.limits import Limits
from topk_export.serve.log import AnswerLog


class Metrics:
    """Counters of one application, or of all worker processes where prometheus_client shares them by files."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("topk_requests", "Requests", ("route", "status"), registry=self.registry)
        self.seconds = Histogram("topk_predict_seconds", "Time of a prediction", registry=self.registry)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batches = Histogram("topk_batch_size", "Inputs a batch", buckets=sizes, registry=self.registry)
        self.waiting = Gauge(
            "topk_queue_length", "Inputs that wait", registry=self.registry, multiprocess_mode="livesum"
        )

    def text(self) -> bytes:
        if not getattr(ValueClass, "_multiprocess", False):
            return generate_latest(self.registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)
        return generate_latest(shared)


class Service:
    """A loaded model between the routes and the threads that work for them. Errors are HTTP errors."""

    def __init__(self, predictor: Predictor, limits: Limits, log: str | None = None) -> None:
        self.predictor, self.limits = predictor, limits
        self._log = AnswerLog(log) if log else None
        self.metrics = Metrics()
        self.batcher = Batcher(
            predictor.run,
            max_batch=limits.batch,
            max_delay=limits.delay_seconds,
            max_queue=limits.queue * limits.images,
            on_batch=self.metrics.batches.observe,
        )
        self.room = asyncio.Semaphore(limits.queue)
        self._decoder = Decoder(predictor, limits.decoders, limits.queue * limits.images)
        self.ranking = Lane("ranking", 1, limits.queue * limits.images)
        blank = np.zeros((1, *predictor.input_shape), predictor.input_type)
        self._warm_up = WarmUp(self.batcher, blank)

    async def start(self, *, warm: bool) -> None:
        """Begin to work; with ``warm`` return once the model has run, or raise RuntimeError where it does not."""
        self.batcher.start()
        self._warm_up.start()
        if warm:
            await self._warm_up.finish()

    async def stop(self) -> None:
        await self._warm_up.stop()
        await self.batcher.stop()
        await asyncio.to_thread(self._decoder.stop)
        await asyncio.to_thread(self.ranking.stop)
        if self._log is not None:
            self._log.close()

    def check_ready(self) -> None:
        """Raise a 503 where no request can be taken: the model has not run yet, or there is no room."""
        if problem := self._warm_up.problem():
            raise try_later(problem)
        if self.room.locked():
            raise try_later(f"{self.limits.queue} requests are in progress already")

    def scrape(self) -> bytes:
        self.metrics.waiting.set(self.batcher.waiting)
        return self.metrics.text()

    async def predict(self, body: bytes, softmax_mass: float | None, max_set: int) -> dict:
        """Return the fields of a ranking for one encoded image."""
        try:
            outputs = await self.batcher(await self._decoder(body))
            found = await self.ranking(ranking, self.predictor, outputs, softmax_mass, max_set)
        except OverloadedError as error:
            raise try_later(str(error)) from error
        except ImageTooLargeError as error:
            raise HTTPException(413, str(error)) from error
        except ImageError as error:
            raise HTTPException(400, str(error)) from error
        except PredictionError as error:
            raise HTTPException(500, str(error)) from error
        if self._log is not None:
            self._log(found)
        return found

    async def predict_all(self, bodies: list[bytes], softmax_mass: float | None, max_set: int) -> list[dict]:
        """Return a ranking for each image, or ``{"detail": ...}`` where the image is at fault."""

        async def one(body: bytes) -> dict:
            try:
                return await self.predict(body, softmax_mass, max_set)
            except HTTPException as error:
                if error.status_code == 503:
                    raise
                return {"detail": error.detail}

        return list(await asyncio.gather(*map(one, bodies)))

    async def run(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Return the model's outputs for inputs [batch, ...], which share runs with other requests."""
        try:
            rows = await asyncio.gather(*(self.batcher(x[i : i + 1]) for i in range(len(x))))
        except OverloadedError as error:
            raise try_later(str(error)) from error
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    async def encode(self, content: object) -> bytes:
        return await self.ranking(encode, content)


def try_later(problem: str) -> HTTPException:
    return HTTPException(503, problem, AGAIN)
