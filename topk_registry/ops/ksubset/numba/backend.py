"""The k-subset operator on the CPU, compiled by numba: fewer passes over the scores than torch operations make.

Rows are shared out among threads; nothing in a row depends on another, nor on who works on it. The compiled bodies are
in entries.py; nothing here needs numba.
"""

from functools import lru_cache

import torch
from torch import Tensor

from topk_registry.ops.cpu import threads as team
from topk_registry.ops.cpu.entries import body
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset.backends import Kernels
from topk_registry.ops.rows.numba.backend import launch
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.tensors import laid_out, operand

ALONE = 1 << 14  # steps to a thread at least: about 20 microseconds of work
OF_LABELS, OF_TARGETS = "ksubset.numba.entries:losses_of_labels", "ksubset.numba.entries:losses_of_targets"
WIDTH = 16  # rows that a thread takes at a time, at most, for their polynomials to fill vectors
GROUP = 1 << 16  # scores that a thread takes at a time, about: they and the polynomials are to stay in its cache


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> tuple[Tensor, Tensor]:
    """The margin theta l_y [B] of each row's label and its gradient to the scores: [B, n], [B] -> [B], [B, n]."""
    s, label = operand(s, s.shape, s.dtype, s.device), operand(label, s.shape[:1], torch.int64, s.device)
    margin, gradient = s.new_empty(s.shape[0], dtype=torch.float64), torch.empty_like(s)
    no_hinge = (None, None, None)
    share("label_margins", s, k, theta, label, margin, gradient, *no_hinge, numbers=(0, 0.0, 0.0, 0.0))
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
    share("label_margins", s, k, theta, label, margin, gradient, alpha, value, slope, numbers=numbers)
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
    share("hinges_of_targets", s, k, theta, *tensors, numbers=(hinge.scale, hinge.tau, factor, *sizes))
    return value, gradient


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l of every class: [B, n] -> [B, n]."""
    s = operand(s, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    share("margins", s, k, theta, out)
    return out


def margins_backward(g: Tensor, s: Tensor, k: int, theta: float) -> Tensor:
    """The vector-Jacobian product of :func:`margins`: cotangents g [B, n], scores [B, n] -> [B, n]."""
    s, g = operand(s, s.shape, s.dtype, s.device), operand(g, s.shape, s.dtype, s.device)
    out = torch.empty_like(s)
    share("margins_backward", s, k, theta, g, out)
    return out


def share(name: str, s: Tensor, k: int, theta: float, *tensors: Tensor | None, numbers: tuple[float, ...] = ()) -> None:
    """Let threads run an entry on the rows of s, with the addresses of ``tensors`` (0 for None) and ``numbers``."""
    B, n = s.shape
    threads, step = threads_and_step(B, n, k)
    one = body(f"ksubset.numba.entries:{name}", s.dtype)
    team.run(one, B, n, k, step, float(theta), s, *tensors, *map(float, numbers), threads=threads)


def threads_and_step(B: int, n: int, k: int) -> tuple[int, int]:
    """Return the number of threads that share the rows, and the number of rows that one takes at a time."""
    polynomials = (2 * k + 3) ** 2
    steps = B * (n + 500 + 2 * polynomials)  # the work: over the scores, and what a row costs besides, as measured
    threads = max(1, min(torch.get_num_threads(), B, steps // ALONE))
    return threads, max(1, min(WIDTH, GROUP // n, GROUP // polynomials, -(-B // threads)))


def hinge_losses(
    scores: Tensor,
    k: int,
    tau: float,
    alpha: Tensor,
    target: Tensor | LabelMixture,
    weight: Tensor | None,
    smoothing: float,
    ignore_index: int,
    reduction: int,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, int]:
    """The smooth top-k SVM in one call: the losses or their sum or mean, the gradient, and a status, see job.py.

    Args:
        scores: logits [B, n] in single precision or bfloat16. All is computed in single.
        alpha: required gaps, one or [n], contiguous float64.
        target: int64 labels [B], a distribution [B, n], or a mixture of labels without a smoothing of its own.
        weight: a factor a class [n].
        reduction: a :class:`topk_registry.ops.targets.masses.Reduction`.
        in_place: whether the gradient may take the place of the scores.
    """
    B, n = scores.shape
    as_it_is = scores.stride(1) == 1 and scores.stride(0) >= n
    scores = (scores if as_it_is else scores.contiguous()).resolve_neg()
    if isinstance(target, LabelMixture):
        target, name = target.in_memory(), OF_TARGETS
    else:
        dense = target.is_floating_point()
        target = laid_out(target, torch.float32 if dense else torch.int64)
        name = OF_TARGETS if dense or smoothing else OF_LABELS
    weight = None if weight is None else laid_out(weight, torch.float64)
    # a row is copied before its gradient is written
    gradient = scores if in_place else torch.empty((B, n), dtype=scores.dtype)
    rows, options = body(name, scores.dtype), (smoothing, ignore_index, reduction)
    given = scores, gradient, target, weight, *options, _numbers(k, tau), (alpha, alpha.numel())
    value, status = launch(rows, 0, *given, *threads_and_step(B, n, k))
    return value, gradient, status


@lru_cache(maxsize=64)
def _numbers(k: int, tau: float) -> Tensor:
    """k, temperature, scale and tau of the hinge, as entries.py reads them."""
    # below this the loss no longer depends on tau, but its reciprocal would overflow
    tau = max(tau, 4 * torch.finfo(torch.float32).tiny)
    return torch.tensor([k, k * tau, 1 / k, tau], dtype=torch.float64)


kernels = Kernels(label_margins, label_hinges, margins, margins_backward, expected_hinges)
