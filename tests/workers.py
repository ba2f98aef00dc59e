"""What the workers of ``pytest -n`` share: processors, fixtures of a file, compiled kernels; and seeds."""

import multiprocessing
import random
from collections import Counter
from importlib.util import find_spec
from multiprocessing.context import BaseContext

import numpy as np
import pytest
import torch

LOADED = ["torch", "topk_registry.nn.linear"]
if torch.distributed.is_available():
    LOADED += ["torch.distributed.tensor", "torch.distributed.checkpoint"]


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

    def pytest_configure(self, config):
        """Compile the kernels for the CPU before the workers of a long run start, or each of them compiles its own."""
        long = config.args_source is not pytest.Config.ArgsSource.ARGS
        if hasattr(config, "workerinput") or not long or not getattr(config.option, "numprocesses", None):
            return
        if find_spec("numba") is not None:
            from topk_registry import create_loss

            for smoothing in (0.0, 0.1):
                create_loss("smooth_topk_svm", label_smoothing=smoothing)(torch.zeros(1, 20), torch.tensor([0]))
