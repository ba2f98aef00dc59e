"""What the workers of ``pytest -n`` share: processors, fixtures of a file, compiled kernels; and seeds."""

import multiprocessing
import os
import random
import shutil
import zlib
from collections import Counter
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import pytest
import torch

LOSSES = Path(__file__).parents[1] / "plugins" / "topk_plugins"
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
        """Compile the kernels of all tests before the workers of a long run start, or each of them compiles its own.

        They become a library, as in a wheel, which pytest's cache folder keeps: tests that are about numba's
        compiler ask for the fixture ``without_library``.
        """
        long = config.args_source is not pytest.Config.ArgsSource.ARGS
        if hasattr(config, "workerinput") or not long or not getattr(config.option, "numprocesses", None):
            return
        if "TOPK_REGISTRY_KERNELS" not in os.environ and find_spec("numba") is not None and shutil.which("cc"):
            os.environ["TOPK_REGISTRY_KERNELS"] = str(built_library(Path(config.cache.mkdir("kernels"))))


def built_library(folder: Path) -> Path:
    """A library of all kernels for this processor in a folder; built where it is not there.

    Its name tells the sources of the losses, whose curves are in it under checksums of their files.
    """
    from topk_registry.cli.kernels import curves
    from topk_registry.ops.cpu.library import opened
    from topk_registry.ops.rows.building import X86, build, levels_here

    level = levels_here()[-1]
    if level in X86 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        level = X86[0]
    sources = b"".join(file.read_bytes() for file in sorted(LOSSES.glob("*.py")))
    path = folder / f"{level}-{zlib.crc32(sources):08x}.so"
    if path.is_file() and not opened(path).why:
        return path

    return build(path, curves(), (level,), folder=folder / "parts", say=lambda done, count: None)
