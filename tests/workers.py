"""What the workers of ``pytest -n`` share: processors, fixtures of a file, compiled kernels; and seeds."""

import multiprocessing
import random
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import WORKERS

MANY = 1000  # tests, of which some need every kernel
LOADED = ["torch", "topk_registry.nn.linear"]
if torch.distributed.is_available():
    LOADED += ["torch.distributed.tensor", "torch.distributed.checkpoint"]
OPERATORS = Path(__file__).parents[1] / "topk_registry" / "ops"


def processes() -> BaseContext:
    """How tests start processes: by copies of one that has loaded torch, where the system has that, else afresh."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


class Plugin:
    """Hooks of pytest and pytest-xdist."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Draws that a test does not seed are the same in every run, whatever ran before."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        """Give a file to one worker, or each of them makes its fixtures."""
        from xdist.scheduler import LoadFileScheduling

        config.option.loadscopereorder = False  # the order of the workers, below
        return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None

    def pytest_collection_modifyitems(self, config, items):
        """Begin with the files of most slow tests, or one worker has such a file to itself at the end."""
        if hasattr(config, "workerinput"):
            slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
            items.sort(key=lambda item: -slow[item.path])

    def pytest_collection_finish(self, session):
        """Compile the kernels of one precision in each worker of a long run, or each of them compiles all."""
        workerinput = getattr(session.config, "workerinput", None)
        if workerinput is None or len(session.items) < MANY or find_spec("numba") is None:
            return
        precisions = (torch.float32, torch.float64)[int(workerinput["workerid"].removeprefix("gw")) :: WORKERS]
        tracer = sys.gettrace()
        sys.settrace(None)  # coverage's slows the compiler by a third, and the compiler runs no file that is counted
        try:
            for dtype in precisions:
                compile_kernels(dtype)
        finally:
            sys.settrace(tracer)
            untraced_no_more()


def untraced_no_more() -> None:
    """A call at which coverage's tracer takes up its count of calls."""


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile what runs on scores of one precision. In one process, the functions that kernels share compile once."""
    from topk_registry.ops.cpu.functions import ENTRIES

    for path in sorted(OPERATORS.glob("*/numba/*.py")):
        import_module(f"topk_registry.ops.{path.parts[-3]}.numba.{path.stem}")
    half = (torch.float16, torch.bfloat16) if dtype == torch.float32 else ()
    for entry in ENTRIES:
        for one in (dtype, *half):
            if one in entry.dtypes:
                entry(one)
