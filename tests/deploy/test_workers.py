"""The order of jobs: the smallest request first, a thread for light ones, and who is dropped when there is too much."""

import asyncio
import threading

import pytest

from topk_export.serve.workers import LIGHT, BusyError, Workers


def test_the_smallest_request_goes_first():
    async def main():
        workers, gate, done = Workers(1, 10**9), threading.Event(), []
        orders = [workers.admit(LIGHT + size) for size in (9, 5, 7, 1)]
        first = asyncio.ensure_future(workers.run(gate.wait, order=orders[0]))
        rest = [asyncio.ensure_future(workers.run(done.append, order.pixels - LIGHT, order=order)) for order in orders]
        await asyncio.sleep(0.01)
        assert done == []  # the one thread for large requests is taken
        assert await workers.run(lambda: "read", order=workers.admit(LIGHT)) == "read"  # the other one is free
        assert await workers.run(lambda: "read") == "read"
        gate.set()
        await asyncio.gather(first, *rest)
        await workers.stop()
        return done

    assert asyncio.run(main()) == [1, 5, 7, 9]


def test_the_largest_waiting_request_is_dropped_for_a_smaller_one():
    async def main():
        workers, gate = Workers(1, 100 * LIGHT), threading.Event()
        started = workers.admit(50 * LIGHT)
        first = asyncio.ensure_future(workers.run(gate.wait, order=started))
        orders = [workers.admit(size * LIGHT) for size in (20, 30)]
        waiting = [asyncio.ensure_future(workers.run(int, order=order)) for order in orders]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="more than"):
            workers.admit(40 * LIGHT)  # none that waits is larger
        small = workers.admit(10 * LIGHT)
        gate.set()
        results = await asyncio.gather(first, *waiting, return_exceptions=True)
        assert results[:2] == [True, 0]
        assert isinstance(results[2], BusyError)
        for order in (started, *orders, small):
            workers.discharge(order)
        workers.discharge(workers.admit(100 * LIGHT))  # nothing is left over
        await workers.stop()

    asyncio.run(main())


def test_errors_and_cancelled_jobs_free_their_thread():
    async def main():
        workers, gate = Workers(1, 10), threading.Event()
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 / 0)
        tasks = [asyncio.ensure_future(workers.run(gate.wait)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await workers.run(int) == 0
        await workers.stop()

    asyncio.run(main())
