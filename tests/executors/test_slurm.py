"""Jobs by submitit, whose own local cluster stands for Slurm."""

import os
from importlib.util import find_spec

import pytest

from topk_registry.executors.errors import WorkerDiedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed: topk-registry[slurm]"),
    # submitit leaves the log files of its local jobs to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def executor(tmp_path):
    from topk_registry.executors.slurm import SlurmExecutor

    executor = SlurmExecutor(2, tmp_path, cluster="local", timeout_min=10)
    yield executor
    executor.kill()


def test_jobs_answer_and_one_that_ends_early_is_a_dead_worker(executor, monkeypatch):
    from submitit.core.core import Job

    monkeypatch.setattr(Job, "_results_timeout_s", 0)  # seconds that a file may take to be seen on another machine
    good, bad, ended = executor.submit(abs, -2), executor.submit(divmod, 1, 0), executor.submit(os._exit, 3)
    assert good.result(timeout=600) == 2
    with pytest.raises(ZeroDivisionError):
        bad.result(timeout=600)
    with pytest.raises(WorkerDiedError, match="ended early"):
        ended.result(timeout=600)


def test_a_cluster_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    from topk_registry.executors.slurm import SlurmExecutor

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="submitit cannot use cluster 'slurm'"):
        SlurmExecutor(1, tmp_path)
    with pytest.raises(ValueError, match="cannot use cluster 'local' with"):
        SlurmExecutor(1, tmp_path, cluster="local", no_such_parameter=1)
