"""The process in which Triton interprets: it has loaded torch, but not triton, which reads the environment once."""

import os
import sys
from pathlib import Path


def run(file: str, environment: dict[str, str], output: str) -> None:
    """Run the tests in a file; to be called in a process of its own, whose exit status says whether they pass."""
    os.environ.clear()
    os.environ.update(environment, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    os.chdir(Path(__file__).parents[2])
    with open(output, "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import pytest
    import torch

    torch.set_num_threads(1)
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:randomly", file])
    sys.stdout.flush()
    sys.exit(code)
