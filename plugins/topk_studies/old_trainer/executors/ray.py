"""An executor of actors on a Ray cluster.

Ray is told of every call through an actor that keeps its process, so that a model is loaded once. Ray's own restarts
are off: who gave a call decides whether it is given again.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from topk_studies.old_trainer.executors.errors import WorkerDiedError
from topk_studies.old_trainer.executors.pool import Call, Interruptible, PoolExecutor


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("ray is not installed: pip install 'topk-registry[ray]'") from error
    return ray


class RayExecutor(PoolExecutor):
    """Does calls in ``workers`` actors; one that dies, or whose node dies, takes its own call with it and is replaced.

    The nodes of the cluster need this distribution, and the folders that the calls name.

    Args:
        workers: number of actors; None: as many as the cluster has room for now.
        address: of the cluster, as of ``ray.init``: ``"auto"``, ``"host:6379"`` or ``"ray://host:10001"``.
        cpus: processors of each actor.
        gpus: GPUs of each actor; may be a part of one.
        memory: bytes of memory that each actor asks for.
        most: the most actors, where their number is left to the cluster.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        address: str = "auto",
        cpus: float = 1.0,
        gpus: float = 0.0,
        memory: int | None = None,
        most: int | None = None,
    ) -> None:
        ray = import_ray()
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=address, log_to_driver=False, logging_level="error")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConnectionError(f"no Ray cluster at {address!r}: {error}") from error
        needs: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if memory is not None:
            needs["memory"] = memory
        room = workers or _room(ray, cpus, gpus)
        super().__init__([_Actor(needs) for _ in range(min(room, most or room))])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            self._disconnect()

    def kill(self) -> None:
        super().kill()
        for thread in self._threads:
            thread.join()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._ours:
            self._ours = False
            import_ray().shutdown()


def _room(ray: Any, cpus: float, gpus: float) -> int:
    """The number of actors that the nodes have room for, each node for itself."""
    count = 0
    for node in ray.nodes():
        if node["Alive"]:
            has: Mapping[str, float] = node["Resources"]
            rooms = [int(has.get(name, 0) / need) for name, need in (("CPU", cpus), ("GPU", gpus)) if need]
            count += min(rooms, default=1)
    if not count:
        raise ValueError(f"no node of the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs for a worker")
    return count


class _Process:
    """The body of an actor."""

    def __init__(self) -> None:
        self._calls = Interruptible()

    def ready(self) -> tuple[str, int]:
        """Keep interrupts for the next call; the node and the process that it is done in."""
        self._calls.ready()
        return import_ray().get_runtime_context().get_node_id(), os.getpid()

    def call(self, task: Call) -> tuple[bool, Any]:
        return self._calls.answer(*task)


def _interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


class _Actor:
    """An actor, created when it is first needed and again after it died."""

    def __init__(self, needs: Mapping[str, Any]) -> None:
        self._needs = needs
        self._actor: Any = None
        self._place: tuple[str, int] | None = None
        self._busy = False
        self._closed = False

    def call(self, task: Call, stopped: Callable[[], bool]) -> Any:
        ray = import_ray()
        if self._closed:
            raise WorkerDiedError("the executor was shut down")
        if stopped():
            raise KeyboardInterrupt
        try:
            if self._actor is None:
                self._actor = ray.remote(_Process).options(max_restarts=0, **self._needs).remote()
            self._place = ray.get(self._actor.ready.remote())
            answer = self._actor.call.remote(task)
            self._busy = True
            if stopped():
                self.interrupt()
            done, value = ray.get(answer)
        except ray.exceptions.RayActorError as error:
            self._actor = None
            raise WorkerDiedError(f"its actor ended: {_first_line(error)}") from error
        finally:
            self._busy = False
        if not done:
            raise value
        return value

    def interrupt(self) -> None:
        if self._busy and self._place is not None:
            ray = import_ray()
            node, pid = self._place
            there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(_interrupt).options(num_cpus=0, scheduling_strategy=there).remote(pid)

    def close(self) -> None:
        self._closed = True
        if self._actor is not None:
            import_ray().kill(self._actor)


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
