"""The k-subset operator on the CPU, compiled by numba: fewer passes over the scores than torch operations make.

Rows are shared out among threads; nothing in a row depends on another, nor on who works on it. The compiled bodies are
in entries.py; nothing here needs numba.
"""

from functools import lru_cache

import torch
from torch import Tensor

from topk_registry.ops.cpu import threads
from topk_registry.ops.cpu.entries import body
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset.backends import Kernels
from topk_registry.ops.targets.label_mixture import LabelMixture
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
    no_hinge = (None, None, None)
    run_on_rows("label_margins", s, k, theta, label, margin, gradient, *no_hinge, numbers=(0, 0.0, 0.0, 0.0))
    return margin, gradient


def label_hinges(
    s: Tensor, label: Tensor, k: int, theta: float, hinge: Hinge, factor: float = 0.0
) -> tuple[Tensor, ...]:
    """:func:`label_margins`, then the hinge's value [B] and slope [B] at the margins.

    With a factor other than 0, value and gradient are those of the hinge times the factor.
    """
    s, label = operand(s, s.shape, s.dtype, s.device), operand(label, s.shape[:1], torch.int64, s.device)
    alpha = operand(hinge.alpha, hinge.alpha.shape, s.dtype, s.device)
    margin, gradient = s.new_empty(s.shape[0], dtype=torch.float64), torch.empty_like(s)
    value, slope = s.new_empty(s.shape[0]), s.new_empty(s.shape[0])
    numbers = (alpha.numel(), hinge.scale, hinge.tau, factor)
    run_on_rows("label_margins", s, k, theta, label, margin, gradient, alpha, value, slope, numbers=numbers)
    return margin, gradient, value, slope


def expected_hinges(
    s: Tensor, target: Tensor | LabelMixture, k: int, theta: float, hinge: Hinge, weight: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """The hinges of a target, weighted, and their gradient: see :mod:`topk_registry.ops.ksubset.soft_targets`."""
    (B, n), real, device = s.shape, s.dtype, s.device
    if weight is None and isinstance(target, Tensor) and not target.is_floating_point():
        _, gradient, value, _ = label_hinges(s, target, k, theta, hinge, factor)
        return value, gradient
    s, alpha = operand(s, s.shape, real, device), operand(hinge.alpha, hinge.alpha.shape, real, device)
    value, gradient = s.new_empty(B), torch.empty_like(s)
    q = labels = shares = uniform = None
    if isinstance(target, LabelMixture):
        labels = operand(target.labels, (B, target.labels.shape[1]), torch.int64, device)
        shares = operand(target.shares.to(real), labels.shape, real, device)
        uniform = None if target.uniform is None else operand(target.uniform.to(real), (B,), real, device)
    elif target.is_floating_point():
        q = operand(target.to(real), (B, n), real, device)
    else:
        labels, shares = operand(target[:, None], (B, 1), torch.int64, device), s.new_ones(B, 1)
    weight = None if weight is None else operand(weight, (n,), real, device)
    gain = torch.exp(-alpha / max(hinge.tau, 4 * torch.finfo(real).tiny))
    few = -1 if labels is None else labels.shape[1]
    sizes = few, uniform is not None, 0 if weight is None else n, alpha.numel()
    tensors = q, labels, shares, uniform, weight, alpha, gain, value, gradient
    run_on_rows("hinges_of_targets", s, k, theta, *tensors, numbers=(hinge.scale, hinge.tau, factor, *sizes))
    return value, gradient


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l of every class: [B, n] -> [B, n]."""
    s = operand(s, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    run_on_rows("margins", s, k, theta, out)
    return out


def margins_backward(g: Tensor, s: Tensor, k: int, theta: float) -> Tensor:
    """The vector-Jacobian product of :func:`margins`: cotangents g [B, n], scores [B, n] -> [B, n]."""
    s, g = operand(s, s.shape, s.dtype, s.device), operand(g, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    run_on_rows("margins_backward", s, k, theta, g, out)
    return out


def run_on_rows(
    name: str, s: Tensor, k: int, theta: float, *tensors: Tensor | None, numbers: tuple[float, ...] = ()
) -> None:
    """Let threads run an entry on the rows of s, with the addresses of ``tensors`` (0 for None) and ``numbers``."""
    B, n = s.shape
    count, step = threads_and_step(k, B, n, torch.get_num_threads())
    one = body(f"ksubset.numba.entries:{name}", s.dtype)
    threads.run(one, B, n, k, step, float(theta), s, *tensors, *map(float, numbers), threads=count)


@lru_cache(maxsize=1024)
def threads_and_step(k: int, B: int, n: int, most: int) -> tuple[int, int]:
    """Return how many of ``most`` threads share the rows, and the number of rows that one takes at a time."""
    polynomials = (2 * k + 3) ** 2
    steps = B * (n + 500 + 2 * polynomials)  # the work: over the scores, and what a row costs besides, as measured
    count = max(1, min(most, B, steps // LEAST_WORK))
    return count, max(1, min(ROWS_AT_ONCE, SCORES_AT_ONCE // n, SCORES_AT_ONCE // polynomials, -(-B // count)))


kernels = Kernels(label_margins, label_hinges, margins, margins_backward, expected_hinges)
