"""Read images in threads ahead of the model, and keep their order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Source = TypeVar("Source")
Read = TypeVar("Read")


def read_ahead(
    read: Callable[[Source], Read], sources: Iterable[Source], *, batch: int, workers: int
) -> Iterator[list[Read]]:
    """Yield lists of ``batch`` results in order, while threads work on the next list; one worker reads none ahead.

    An error of ``sources`` itself is raised after the results of everything that came before it.
    """
    failure: list[Exception] = []
    source = _until_failure(iter(sources), failure)
    if workers == 1:
        while results := [read(item) for item in islice(source, batch)]:
            yield results
    else:
        yield from _in_threads(read, source, batch, workers)
    if failure:
        raise failure[0]


def _in_threads(
    read: Callable[[Source], Read], source: Iterator[Source], batch: int, workers: int
) -> Iterator[list[Read]]:
    waiting: deque[Future[Read]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read")
    try:
        while True:
            waiting.extend(pool.submit(read, item) for item in islice(source, 2 * batch - len(waiting)))
            if not waiting:
                break
            yield [waiting.popleft().result() for _ in range(min(batch, len(waiting)))]
    finally:
        pool.shutdown(cancel_futures=True)


def _until_failure(source: Iterator[Source], failure: list[Exception]) -> Iterator[Source]:
    try:
        yield from source
    except Exception as error:
        failure.append(error)
