"""Peak memory of a step beyond what was there before it."""

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile

# the profiler otherwise reports on stderr, for every run, that it finds no GPU
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(run: Callable[[], object], device: str = "cpu") -> int:
    """Most bytes that tensors made by ``run()`` held at one time.

    On the CPU every allocation and release of PyTorch's allocator counts, those inside an operator included; memory
    that a library takes elsewhere (numpy, a C extension's own malloc) does not.
    """
    return _cuda_peak(run) if torch.device(device).type == "cuda" else _cpu_peak(run)


def _cpu_peak(run: Callable[[], object]) -> int:
    profiler: Any = profile(profile_memory=True)
    with profiler:
        run()
    # the profiler's own list of events would be made from these, object by object
    events = (event for event in profiler.kineto_results.events() if event.name() == "[memory]")
    changes = sorted((event.start_ns(), order, event.nbytes()) for order, event in enumerate(events))
    return max(accumulate((nbytes for _, _, nbytes in changes), initial=0))


def _cuda_peak(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
