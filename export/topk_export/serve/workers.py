"""Threads that read requests and decode images, such that large requests cannot delay small ones."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
LIGHT = 3_000_000  # pixels up to which a request may use the additional thread


class BusyError(RuntimeError):
    """The images in progress have too many pixels. The client may send the request again."""


@dataclass(eq=False)
class Order:
    """The images of one request: the number of their pixels, and whether a thread has taken one of them."""

    pixels: int
    started: bool = False


@dataclass(order=True)
class _Job:
    pixels: int  # of the whole request
    number: int
    order: Order | None = field(compare=False)
    call: Callable[[], Any] = field(compare=False)
    answer: "asyncio.Future[Any]" = field(compare=False)


class Workers:
    """Threads that run the jobs of the request with the fewest pixels first.

    There is one thread more than ``threads``. It takes only jobs of requests with at most ``LIGHT`` pixels, so that a
    small request does not wait for large images.

    If all requests together have more than ``limit`` pixels, the largest request of which no thread has taken an image
    raises :class:`BusyError`.
    """

    def __init__(self, threads: int, limit: int) -> None:
        self._limit, self._free = limit, threads + 1
        self._pool = ThreadPoolExecutor(threads + 1, thread_name_prefix="decode")
        self._jobs: list[_Job] = []
        self._orders: set[Order] = set()
        self._numbers = itertools.count()

    async def stop(self) -> None:
        """Wait until the threads are idle, then stop them."""
        await asyncio.to_thread(self._pool.shutdown)

    async def run(self, function: Callable[..., T], *args: Any, order: Order | None = None) -> T:
        """Call ``function`` in a thread, and return the result. Without ``order``, the job is a short one."""
        loop = asyncio.get_running_loop()
        pixels = order.pixels if order is not None else 0
        job = _Job(pixels, next(self._numbers), order, partial(function, *args), loop.create_future())
        heapq.heappush(self._jobs, job)
        self._start()
        return await job.answer

    def admit(self, pixels: int) -> Order:
        """Return the order of a request with this number of pixels. The caller must :meth:`discharge` the order.

        Raises:
            BusyError: no larger request can be dropped.
        """
        while sum(order.pixels for order in self._orders) + pixels > self._limit:
            idle = [order for order in self._orders if not order.started and order.pixels > pixels]
            if not idle:
                raise BusyError(f"images of more than {self._limit} pixels are in progress")
            self._drop(max(idle, key=lambda order: order.pixels))
        order = Order(pixels)
        self._orders.add(order)
        return order

    def discharge(self, order: Order) -> None:
        self._orders.discard(order)

    def _drop(self, order: Order) -> None:
        self._orders.discard(order)
        for job in self._jobs:
            if job.order is order and not job.answer.done():
                job.answer.set_exception(BusyError("smaller requests go first"))

    def _start(self) -> None:
        while self._jobs and self._free > int(self._jobs[0].pixels > LIGHT):
            job = heapq.heappop(self._jobs)
            if job.answer.done():  # no caller waits for this job
                continue
            if job.order is not None:
                job.order.started = True
            self._free -= 1
            loop = job.answer.get_loop()
            thread = self._pool.submit(job.call)
            thread.add_done_callback(lambda done, job=job, loop=loop: loop.call_soon_threadsafe(self._end, job, done))

    def _end(self, job: _Job, done: "Future[Any]") -> None:
        self._free += 1
        if not job.answer.done():
            if (error := done.exception()) is not None:
                job.answer.set_exception(error)
            else:
                job.answer.set_result(done.result())
        self._start()
