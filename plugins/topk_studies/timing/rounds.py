"""Times of forward and backward, taken in rounds: every contestant once a round, so that noise hits all alike."""

import gc
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from topk_studies.timing.contest import Loss

Sample = tuple[float, float]  # seconds of the forward and of the backward pass of one step
Step = Callable[[], Sample]
FLUSHED = {"cpu": 1 << 26, "cuda": 1 << 28}  # bytes, several times the last cache of a server's CPU or GPU


class OverLimitError(Exception):
    """A step took longer than it may."""


@dataclass(frozen=True)
class Spread:
    """Seconds."""

    median: float
    q1: float
    q3: float
    minimum: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        q1, median, q3 = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        return cls(median, q1, q3, min(seconds))


def step(
    loss: Loss,
    logits: Tensor,
    target: Tensor,
    *,
    clock: "Clock | None" = None,
    caches: str = "as they are",
    graph: bool = False,
) -> Step:
    """One forward and backward pass, timed each; the gradient is allocated anew, as an optimiser's zero_grad has it.

    Args:
        caches: ``"hot"``, an untimed step comes first; ``"cold"``, other memory is written first; or ``"as they are"``,
            left by whatever ran before.
        graph: time replays of a CUDA graph, which holds no launch and no Python. The forward pass is a graph of its
            own; the backward pass is the rest of the whole step's time.
    """
    clock = clock or (CUDA if logits.is_cuda else CPU)
    if graph:
        return _graph_step(loss, logits, target, clock, caches == "cold")

    def run() -> Sample:
        if caches == "cold":
            flush(logits.device)
            if logits.is_cuda:  # or the step would be launched while the caches are flushed, and seem to cost nothing
                torch.cuda.synchronize()
        elif caches == "hot":
            loss(logits, target).backward()
            logits.grad = None
        start = clock.mark()
        value = loss(logits, target)
        middle = clock.mark()
        value.backward()
        end = clock.mark()
        logits.grad = None
        return clock.seconds(start, middle), clock.seconds(middle, end)

    return run


def _graph_step(loss: Loss, logits: Tensor, target: Tensor, clock: "Clock", cold: bool) -> Step:
    forward = captured(lambda: loss(logits, target))
    whole = captured(lambda: torch.autograd.grad(loss(logits, target), logits))

    def seconds(replay: Callable[[], object]) -> float:
        if cold:
            flush(logits.device)
        start = clock.mark()
        replay()
        return clock.seconds(start, clock.mark())

    def run() -> Sample:
        first = seconds(forward)
        return first, seconds(whole) - first

    return run


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """What replays the work of ``run()`` on the GPU as one CUDA graph; without a GPU, ``run`` itself."""
    if not torch.cuda.is_available():
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # as torch's notes on CUDA graphs have it: what is set up once is not to be captured
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Captured(graph, run)


@dataclass(frozen=True)
class Captured:
    """Replays a CUDA graph, which has the addresses of what it reads alone: ``run`` keeps that alive."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def flush(device: torch.device) -> None:
    """Write other memory than what is timed, so that caches hold that."""
    _other(device.type).add_(1)


@cache
def _other(kind: str) -> Tensor:
    return torch.zeros(FLUSHED[kind] // 4, device=kind)


def interleave(
    steps: Mapping[str, Step],
    samples: dict[str, list[Sample]],
    *,
    repeats: int,
    limit: float,
    tick: Callable[[str], None] = lambda name: None,
) -> None:
    """Append up to ``repeats`` samples of every step to ``samples``, in rounds over all of them.

    A step that has taken ``limit`` seconds, what it does untimed included, sits out the remaining rounds. The lists are
    the caller's, so that an interrupt loses nothing.
    """
    spent = {name: sum(map(sum, samples[name])) for name in steps}
    gc.disable()
    gc.freeze()  # what was there before is not looked through between the rounds
    try:
        order = list(steps.items())
        for _ in range(repeats):
            gc.collect()  # between rounds, lest cycles of one contestant fill the memory or stop another's clock
            order.append(order.pop(0))  # each goes first, with cold caches, in its turn
            for name, run in order:
                if spent[name] < limit:
                    start = time.perf_counter()
                    samples[name].append(run())
                    spent[name] += max(time.perf_counter() - start, sum(samples[name][-1]))
                tick(name)
    finally:
        gc.unfreeze()
        gc.enable()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`OverLimitError` inside the block after this many seconds, at the next Python instruction.

    Signals reach the main thread only; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(*_: object) -> None:
        raise OverLimitError(f"over the limit of {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass(frozen=True)
class Clock:
    mark: Callable[[], Any]
    seconds: Callable[[Any, Any], float]  # between two marks


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1000


CPU = Clock(time.perf_counter, lambda start, end: end - start)
CPU_TIME = Clock(time.thread_time, lambda start, end: end - start)  # of this thread: blind to other processes
CUDA = Clock(_cuda_mark, _cuda_seconds)
