"""An executor of Slurm jobs, by submitit: each call is a job of its own."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topk_studies.old_trainer.executors.errors import WorkerDiedError
from topk_studies.old_trainer.executors.pool import Call, PoolExecutor, answer

POLL = {"slurm": 5.0}  # seconds between two looks at a job; Slurm's accounting is not to be asked more often
SOON = 0.2


class SlurmExecutor(PoolExecutor):
    """Does calls as Slurm jobs, at most ``workers`` at once; a job that ends early takes its own call with it.

    Args:
        workers: most jobs that wait or run at once.
        folder: where jobs, their answers and their logs are written; all nodes must see it.
        cluster: ``"slurm"``, or ``"local"`` for processes of this machine, to try a command.
        options: of submitit's ``update_parameters``, such as ``timeout_min=120, slurm_partition="gpu"``.
    """

    def __init__(self, workers: int, folder: str | Path, *, cluster: str = "slurm", **options: Any) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ImportError("submitit is not installed: pip install 'topk-registry[slurm]'") from error
        try:
            jobs = submitit.AutoExecutor(folder=Path(folder) / "%j", cluster=cluster)
            jobs.update_parameters(**options)
        except (RuntimeError, ValueError, NameError, TypeError) as error:
            raise ValueError(f"submitit cannot use cluster {cluster!r} with {dict(options)}: {error}") from error
        super().__init__([_Slot(jobs, cluster) for _ in range(workers)])


class _Slot:
    """One job at a time."""

    def __init__(self, jobs: Any, cluster: str) -> None:
        self._jobs, self._cluster = jobs, cluster
        self._job: Any = None
        self._closed = False

    def call(self, task: Call, stopped: Callable[[], bool]) -> Any:
        from submitit.core.utils import UncompletedJobError

        if self._closed:
            raise WorkerDiedError("the executor was shut down")
        if stopped():
            raise KeyboardInterrupt
        self._job = self._jobs.submit(answer, *task)
        if stopped():
            self.interrupt()
        try:
            while not self._job.done():
                time.sleep(POLL.get(self._cluster, SOON))
            done, value = self._job.result()
        except UncompletedJobError as error:
            words = str(error).strip().splitlines()
            raise WorkerDiedError(f"job {self._job.job_id} ended early: {words[0]}") from error
        finally:
            self._job = None
        if not done:
            raise value
        return value

    def interrupt(self) -> None:
        if (job := self._job) is not None:
            self._signal(job, signal.SIGINT)

    def close(self) -> None:
        self._closed = True
        if (job := self._job) is not None:
            self._signal(job, signal.SIGKILL)

    def _signal(self, job: Any, signum: signal.Signals) -> None:
        if self._cluster == "slurm":
            name = signum.name.removeprefix("SIG")
            subprocess.run(["scancel", f"--signal={name}", str(job.job_id)], check=False)
        elif signum == signal.SIGINT:
            job.cancel()  # of processes of this machine that is an interrupt
