"""What workers of ``pytest -n`` share: the processors, the fixtures of a file, the compilation of kernels."""

import multiprocessing
from importlib.util import find_spec

import pytest
import torch

from tests import WORKERS

MANY = 1000  # tests, of which some need every kernel
LOADED = ["torch", "topk_registry.nn.linear"]
if torch.distributed.is_available():
    LOADED += ["torch.distributed.tensor", "torch.distributed.checkpoint"]


def processes() -> multiprocessing.context.BaseContext:
    """How tests start processes: by copies of one that has loaded torch, where the system has that, else afresh."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


class Plugin:
    """Hooks of pytest and pytest-xdist."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        """Give a file to one worker, or each of them makes its fixtures."""
        from xdist.scheduler import LoadFileScheduling

        return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None

    def pytest_collection_finish(self, session):
        """Compile a part of the slowest kernels in each worker of a long run, or each of them compiles all."""
        workerinput = getattr(session.config, "workerinput", None)
        if workerinput is None or len(session.items) < MANY or find_spec("numba") is None:
            return
        from topk_registry.ops.ksubset.numba import backend

        bodies = (backend._label_margins, backend._margins_backward, backend._expected_hinges, backend._margins)
        kernels = [(body, dtype) for body in bodies for dtype in (torch.float32, torch.float64)]
        for body, dtype in kernels[int(workerinput["workerid"].removeprefix("gw")) :: WORKERS]:
            body(dtype)
