"""A model at work for many requests, and its replacement by another release while requests come."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import HTTPException, Request

from topk_export.errors import ImageError, ImageTooLargeError, ModelFileError, PredictionError
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import check_outputs
from topk_export.serve.answers import encode, ranking
from topk_export.serve.batching import OverloadedError
from topk_export.serve.decoding import Lane
from topk_export.serve.guard import AGAIN, facts_of
from topk_export.serve.limits import Limits
from topk_export.serve.log import Lines, answer_entry
from topk_export.serve.metrics import Metrics
from topk_export.serve.model import ServedModel
from topk_export.serve.releases import Release


class Service:
    """A loaded model between the routes and the threads that work for them. Errors are HTTP errors.

    Another release takes the model's place in three steps, so that several processes can take them together: it is
    prepared while the old one answers; requests are held for the moment in which all processes switch; then they go on
    with the new one, while those that were begun end with the old one.
    """

    def __init__(self, predictor: Predictor, release: Release, limits: Limits, log: str | None = None) -> None:
        self.limits = limits
        self._log = Lines(log) if log else None
        self.metrics = Metrics()
        self.model = ServedModel(predictor, release, limits, self.metrics)
        self.room = asyncio.Semaphore(limits.queue)
        self.lane = Lane("ranking", 1, limits.queue * limits.images)
        self.started = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._next: ServedModel | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self, *, warm: bool) -> None:
        """Begin to work; with ``warm`` return once the model has run, or raise RuntimeError where it does not."""
        self.loop = asyncio.get_running_loop()
        await self.model.start(warm=warm)
        self.metrics.serve(self.model.release)
        self.started.set()

    async def stop(self) -> None:
        await self.drop()
        await self.model.stop()
        await asyncio.gather(*self._retiring)
        await asyncio.to_thread(self.lane.stop)
        if self._log is not None:
            self._log.close()

    async def prepare(self, load: Callable[[], Predictor], release: Release) -> None:
        """Load a release and run it once, beside the one that answers."""
        predictor = await asyncio.to_thread(load)
        check_outputs(predictor.output_names, predictor.metadata)
        predictor.metadata.preprocess.check_known()
        self._next = ServedModel(predictor, release, self.limits, self.metrics)
        await self._next.start(warm=True)

    async def hold(self) -> None:
        """Let new requests wait; those in progress go on."""
        self._open.clear()

    async def switch(self) -> None:
        """Answer by the prepared release from now on."""
        assert self._next is not None
        old, self.model, self._next = self.model, self._next, None
        self.metrics.serve(self.model.release, old.release)
        self._open.set()
        task = asyncio.create_task(old.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def drop(self) -> None:
        """Give a prepared release up, and go on as before."""
        new, self._next = self._next, None
        self._open.set()
        if new is not None:
            await new.stop()

    def check_ready(self) -> None:
        """Raise a 503 where no request can be taken: the model has not run yet, or there is no room."""
        if problem := self.model.problem():
            raise try_later(problem)
        if self.room.locked():
            raise try_later(f"{self.limits.queue} requests are in progress already")

    @asynccontextmanager
    async def turn(self, request: Request) -> AsyncIterator[ServedModel]:
        """Take a place for a request, and the model that answers it from beginning to end."""
        self.check_ready()
        async with self.room:
            await self._open.wait()
            model = self.model
            facts_of(request.scope).update(model.release.facts)
            with model.used():
                yield model

    def group(self, model: ServedModel, name: str | None) -> int | None:
        """Return the number of a request's group, by its name; None where the model has no thresholds by group.

        Raises:
            HTTPException: 400, the model has no such group, or the request names none where it must.
        """
        self.check_group(model, told=name is not None)
        try:
            return model.predictor.group_number(name)
        except ModelFileError as error:
            raise HTTPException(400, str(error)) from error

    def check_group(self, model: ServedModel, *, told: bool) -> None:
        """Raise a 400 where a request tells no group, and must."""
        names = model.predictor.metadata.group_names
        if self.limits.require_group and names and not told:
            raise HTTPException(400, f"expected the group of each image, got none; there are {', '.join(names)}")

    def scrape(self) -> bytes:
        self.metrics.waiting.set(self.model.batcher.waiting)
        return self.metrics.text()

    async def predict(
        self,
        model: ServedModel,
        body: bytes,
        softmax_mass: float | None,
        max_set: int,
        facts: Mapping[str, Any],
        group: str | None = None,
    ) -> dict:
        """Return the fields of a ranking for one encoded image, of the group of this name."""
        number = self.group(model, group)
        try:
            with model.stage("input"):
                x = await model.decoder(body)
            outputs = await model.batcher(x, number)
            with model.stage("output"):
                fields = await self.lane(ranking, model.predictor, outputs, softmax_mass, max_set)
        except OverloadedError as error:
            raise try_later(str(error)) from error
        except ImageTooLargeError as error:
            raise HTTPException(413, str(error)) from error
        except ImageError as error:
            raise HTTPException(400, str(error)) from error
        except PredictionError as error:
            raise HTTPException(500, str(error)) from error
        if self._log is not None:
            self._log(answer_entry(fields, facts if group is None else {**facts, "group": group}))
        return fields

    async def predict_all(
        self,
        model: ServedModel,
        bodies: list[bytes],
        softmax_mass: float | None,
        max_set: int,
        facts: Mapping[str, Any],
        groups: Sequence[str | None],
    ) -> list[dict]:
        """Return a ranking for each image, or ``{"detail": ...}`` where the image is at fault."""

        async def one(body: bytes, group: str | None) -> dict:
            try:
                return await self.predict(model, body, softmax_mass, max_set, facts, group)
            except HTTPException as error:
                if error.status_code == 503:
                    raise
                return {"detail": error.detail}

        return list(await asyncio.gather(*map(one, bodies, groups)))

    async def run(
        self, model: ServedModel, x: np.ndarray, groups: Sequence[int | None] | None = None
    ) -> dict[str, np.ndarray]:
        """Return the model's outputs for inputs [batch, ...], which share runs with other requests.

        Args:
            model: the release.
            x: the inputs.
            groups: the number of each input's group [batch].
        """
        numbers = [None] * len(x) if groups is None else groups
        try:
            rows = await asyncio.gather(*(model.batcher(x[i : i + 1], number) for i, number in enumerate(numbers)))
        except OverloadedError as error:
            raise try_later(str(error)) from error
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    async def encode(self, content: object) -> bytes:
        return await self.lane(encode, content)


def try_later(problem: str) -> HTTPException:
    return HTTPException(503, problem, AGAIN)
