"""The k-subset operator on the CPU, compiled by numba: fewer passes over the scores than torch operations make.

Rows are shared out among threads; nothing in a row depends on another, nor on who works on it. The compiled bodies are
in entries.py; nothing here needs numba.
"""

from functools import lru_cache, partial

import torch
from torch import Tensor

from topk_registry.ops.cpu import threads
from topk_registry.ops.cpu.entries import body
from topk_registry.ops.hinge import Hinge, invertible
from topk_registry.ops.ksubset.backends import LARGE_K, LARGE_K_OF_LABEL, LARGE_K_OF_MARGINS, Kernels
from topk_registry.ops.ksubset.request import SINGLE, check_finite
from topk_registry.ops.rows.numba.backend import BatchKernel
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import NO_LABEL, Options, Reduction
from topk_registry.ops.tensors import operand

LEAST_WORK = 1 << 14  # steps to a thread at least: about 20 microseconds of work
ROWS_AT_ONCE = 16  # rows that a thread takes at a time, at most, for their polynomials to fill vectors
SCORES_AT_ONCE = (
    1 << 16
)  # scores that a thread takes at a time, about: they and the polynomials are to stay in its cache


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> tuple[Tensor, Tensor]:
    """The margin theta l_y [B] of each row's label and its gradient to the scores: [B, n], [B] -> [B], [B, n]."""
    s, label = operand(s, s.shape, s.dtype, s.device), operand(label, s.shape[:1], torch.int64, s.device)
    margin, gradient = s.new_empty(s.shape[0], dtype=torch.float64), torch.empty_like(s)
    run_on_rows(_for("label_margins", k, LARGE_K_OF_LABEL), s, k, theta, label, margin, gradient)
    return margin, gradient


def expected_hinges(
    s: Tensor, target: Tensor | LabelMixture, k: int, theta: float, hinge: Hinge, weight: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """The hinges of a target, weighted, and their gradient: see :mod:`topk_registry.ops.ksubset.soft_targets`."""
    factors = s.new_tensor(factor, dtype=torch.float64)
    factors = factors.expand(s.shape[1]) if weight is None else weight * factors
    options, tau = Options(target, factors, 0.0, NO_LABEL, Reduction.NONE), invertible(hinge.tau, s.dtype)
    value, gradient = loss_kernel(k, theta, hinge.scale, tau).run((hinge.alpha,), options, s, True)
    assert gradient is not None
    return value, gradient


@lru_cache(maxsize=64)
def loss_kernel(k: int, theta: float, scale: float, tau: float, in_double: bool = False) -> BatchKernel:
    """Return the kernel of a hinge on margins, in double precision or in that of the scores."""
    of_targets = "losses_of_targets_of_largest_k" if k > SINGLE else _for("losses_of_targets", k, LARGE_K)
    return BatchKernel(
        f"ksubset.numba.entries:{_for('losses_of_labels', k, LARGE_K_OF_LABEL)}",
        f"ksubset.numba.entries:{of_targets}",
        (k, theta, scale, tau),
        shares=partial(threads_and_block, k),
        # of float16 scores the gradient is in single precision anyway
        reads=(torch.float64,) if in_double else (torch.float32, torch.bfloat16, torch.float64),
        check=partial(check_finite, k=k),
    )


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l of every class: [B, n] -> [B, n]."""
    s = operand(s, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    run_on_rows(_for("margins", k, _large(s)), s, k, theta, out)
    return out


def margins_backward(g: Tensor, s: Tensor, k: int, theta: float) -> Tensor:
    """The vector-Jacobian product of :func:`margins`: cotangents g [B, n], scores [B, n] -> [B, n]."""
    s, g = operand(s, s.shape, s.dtype, s.device), operand(g, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    run_on_rows(_for("margins_backward", k, _large(s)), s, k, theta, g, out)
    return out


def _large(s: Tensor) -> int:
    """From which k on margins of all classes are taken by division, which loses up to five bits of their gradient."""
    return LARGE_K_OF_MARGINS if s.dtype == torch.float32 else SINGLE + 1


def _for(entry: str, k: int, large: int) -> str:
    """The name of an entry, for small k or for those from ``large`` on."""
    return f"{entry}_of_large_k" if k >= large else entry


def run_on_rows(name: str, s: Tensor, k: int, theta: float, *tensors: Tensor) -> None:
    """Let threads run an entry on the rows of s, with the addresses of ``tensors``."""
    B, n = s.shape
    count, block = threads_and_block(k, B, n, torch.get_num_threads())
    one = body(f"ksubset.numba.entries:{name}", s.dtype)
    threads.run(one, B, n, k, block, float(theta), s, *tensors, threads=count)


@lru_cache(maxsize=1024)
def threads_and_block(k: int, B: int, n: int, most: int) -> tuple[int, int]:
    """Return how many of ``most`` threads share the rows, and the number of rows that one takes at a time."""
    polynomials = (2 * k + 3) ** 2
    steps = B * (n + 500 + 2 * polynomials)  # the work: over the scores, and what a row costs besides, as measured
    count = max(1, min(most, B, steps // LEAST_WORK))
    return count, max(1, min(ROWS_AT_ONCE, SCORES_AT_ONCE // n, SCORES_AT_ONCE // polynomials, -(-B // count)))


kernels = Kernels(label_margins, margins, margins_backward, expected_hinges)
