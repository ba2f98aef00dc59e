"""Dynamic batching: full batches, nobody waits long, everybody gets their own row, nobody is forgotten."""

import asyncio
import threading
import time

import numpy as np
import pytest

from topk_export.serve.batching import Batcher, OverloadedError


def doubled(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"twice": 2 * x, "index": np.arange(len(x))}


def item(value: float) -> np.ndarray:
    return np.full((1, 2), value)


class Gate:
    """A run that waits until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        assert self.open.wait(60)
        return doubled(x)


async def settled(batcher: Batcher, waiting: int) -> None:
    for _ in range(10_000):
        if batcher.waiting == waiting:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{batcher.waiting} wait, not {waiting}")


def test_everybody_gets_their_own_row_and_batches_are_full():
    sizes = []

    async def main() -> list[float]:
        batcher = Batcher(doubled, max_batch=8, max_delay=3600.0, on_batch=sizes.append)
        batcher.start()
        # full batches do not wait for the delay
        answers = await asyncio.wait_for(asyncio.gather(*(batcher(item(i)) for i in range(64))), timeout=60)
        await batcher.stop()
        assert all(answer["twice"].shape == (1, 2) for answer in answers)
        return [float(answer["twice"][0, 0]) for answer in answers]

    assert asyncio.run(main()) == [2.0 * i for i in range(64)]
    assert sizes == [8] * 8


def test_a_lone_input_leaves_after_the_delay():
    sizes = []

    async def main() -> float:
        batcher = Batcher(doubled, max_batch=8, max_delay=0.05, on_batch=sizes.append)
        batcher.start()
        start = time.perf_counter()
        await batcher(item(1))
        seconds = time.perf_counter() - start
        await batcher.stop()
        return seconds

    assert asyncio.run(main()) >= 0.05
    assert sizes == [1]


def test_what_comes_during_a_run_leaves_together():
    sizes, gate = [], Gate()

    async def main() -> list[float]:
        batcher = Batcher(gate, max_batch=16, max_delay=0.0, on_batch=sizes.append)
        batcher.start()
        first = asyncio.create_task(batcher(item(0)))
        while not sizes:
            await asyncio.sleep(0.001)
        rest = [asyncio.create_task(batcher(item(i))) for i in range(1, 6)]
        await settled(batcher, 5)
        gate.open.set()
        answers = await asyncio.gather(first, *rest)
        await batcher.stop()
        return [float(answer["twice"][0, 0]) for answer in answers]

    assert asyncio.run(main()) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert sizes == [1, 5]


def test_a_full_queue_refuses_at_once_and_recovers():
    sizes, gate = [], Gate()

    async def main() -> None:
        batcher = Batcher(gate, max_batch=1, max_delay=0.0, max_queue=2, on_batch=sizes.append)
        batcher.start()
        running = asyncio.create_task(batcher(item(0)))
        while not sizes:
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(batcher(item(i))) for i in (1, 2)]
        await settled(batcher, 2)
        with pytest.raises(OverloadedError, match="2 requests are waiting already"):
            await batcher(item(3))
        gate.open.set()
        await asyncio.gather(running, *waiting)
        assert (await batcher(item(4)))["twice"][0, 0] == 8
        await batcher.stop()

    asyncio.run(main())


def test_those_who_have_gone_are_left_out():
    sizes, gate = [], Gate()

    async def main() -> None:
        batcher = Batcher(gate, max_batch=4, max_delay=0.0, on_batch=sizes.append)
        batcher.start()
        first = asyncio.create_task(batcher(item(0)))
        while not sizes:
            await asyncio.sleep(0.001)
        gone, stays = (asyncio.create_task(batcher(item(i))) for i in (1, 2))
        await settled(batcher, 2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        gate.open.set()
        await first
        assert (await stays)["twice"][0, 0] == 4
        await batcher.stop()

    asyncio.run(main())
    assert sizes == [1, 1]


def test_an_error_of_the_model_reaches_its_batch_and_the_next_one_runs():
    def sometimes(x: np.ndarray) -> dict[str, np.ndarray]:
        if (x < 0).any():
            raise RuntimeError("the model failed")
        return doubled(x)

    async def main() -> None:
        batcher = Batcher(sometimes, max_batch=2, max_delay=0.01)
        batcher.start()
        answers = await asyncio.gather(batcher(item(-1)), batcher(item(1)), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["the model failed"] * 2
        assert (await batcher(item(3)))["twice"][0, 0] == 6
        await batcher.stop()

    asyncio.run(main())


def test_stopping_tells_those_who_wait():
    gate = Gate()

    async def main() -> list[BaseException]:
        batcher = Batcher(gate, max_batch=1, max_delay=0.0)
        batcher.start()
        tasks = [asyncio.create_task(batcher(item(i))) for i in range(3)]
        await settled(batcher, 2)
        asyncio.get_running_loop().call_later(0.05, gate.open.set)
        await batcher.stop()
        with pytest.raises(OverloadedError, match="shutting down"):
            await batcher(item(9))
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [str(answer) for answer in asyncio.run(main())] == ["the server is shutting down"] * 3
