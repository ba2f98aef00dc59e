"""The k-subset operator on GPUs, in Triton: the algorithm of torch/rows.py in one kernel, or in a few passes.

Losses with k up to 10, of one label a row (one_label.py) or of a distribution (expected.py): one kernel, which writes
the gradient as it is wanted in the end, with the slopes of the hinges, class weights and the factor of a mean. Flat
rows need no selection there. For larger k, and for the margins of all classes themselves, a few passes over the logits,
and between them a small kernel that works on a few numbers a row. For losses with larger k the one kernel does the flat
rows before, and the passes skip them; a target of several labels and no more is a sum of such losses. The split is by
registers and compile time: coefficients and powers of the one kernel are unrolled.

The kernels are held against the definition on a GPU and under Triton's interpreter. The sizes below follow from the
registers that the compiler reports and from the instructions of the machine code (``python -m tests.bench
instructions``); how many warps work on a row was timed on an H200.

Half-precision scores are read as they are and computed with in single precision. A row's results depend on nothing but
that row and where it lies: from odd addresses a row is added up in another order. Rows with a NaN, with fewer than
k + 1 finite scores, or with a label that is no class, come out as NaN. Nothing waits for the device.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from struct import pack, unpack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topk_registry.ops.gpu.layout import compiled_for, in_rows, like_rows, power_of_two, tiles
from topk_registry.ops.hinge import Hinge, invertible
from topk_registry.ops.ksubset.backends import Kernels
from topk_registry.ops.ksubset.triton import all_classes, expected, one_label, passes
from topk_registry.ops.rows.backends import Own
from topk_registry.ops.rows.triton.driver import part_of_row, reduced
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import NO_LABEL, Masses, Options, Reduction
from topk_registry.ops.tensors import laid_out, launch, operand

ONE_KERNEL_LARGEST_K = 10
POWERS = 12  # of a flat row for larger k; 16 would make few more rows flat, at 80 instead of 65 instructions a score
POWERS_OF_TARGETS = 10  # the same for distributions, whose rows need more registers
SCORES_A_PROGRAM = 16384  # scores that one program selects the largest from, twice as many in half precision
TILE = 4096  # scores that one program writes


class Rows(NamedTuple):
    """Rows of scores where they lie, a copy only where :func:`in_rows` makes one."""

    memory: Tensor
    step: int  # numbers from a row to the next
    shape: torch.Size

    @classmethod
    def of(cls, s: Tensor) -> "Rows":
        return cls(*in_rows(s), s.shape)

    def like(self, dtype: torch.dtype | None = None) -> "tuple[Rows, Tensor]":
        """New memory with the same strides, and as a tensor [B, n]."""
        memory, rows = like_rows(self.shape, self.step, dtype or self.memory.dtype, self.memory.device)
        return Rows(memory, self.step, self.shape), rows


def label_margins(s: Tensor, label: Tensor, k: int, theta: float) -> tuple[Tensor, Tensor]:
    """The margin theta l_y [B] of each row's label, in double precision, and its gradient: [B, n], [B] -> [B], [B, n].

    The gradient has the dtype of the scores.
    """
    rows = Rows.of(s)
    margin, (out, gradient) = s.new_empty(s.shape[0], dtype=torch.float64), rows.like()
    tensors = dict.fromkeys(("alpha_ptr", "weight_ptr", "share_ptr"), margin)
    numbers = dict.fromkeys(("scale", "scale_low", "tau", "inverse_tau", "inverse_tau_low"), 0.0) | {"factor": 1.0}
    uses = dict.fromkeys(("HINGE", "PER_CLASS", "WEIGHTED", "SHARED"), False)
    _at_labels(rows, label, k, theta, margin, out, tensors | numbers | uses)
    return margin, gradient


def expected_hinges(
    s: Tensor, target: Tensor | LabelMixture, k: int, theta: float, hinge: Hinge, weight: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """The hinges of a target, weighted, and their gradient: see :mod:`topk_registry.ops.ksubset.soft_targets`.

    The gradient has the dtype of the scores, but for float16 it is in single precision: the factor of a mean would
    take it out of that type's range before a scaled loss brings it back.
    """
    return hinges(s, Options(target, weight, 0.0, NO_LABEL, Reduction.NONE), k, theta, hinge, factor)


def hinges(s: Tensor, options: Options, k: int, theta: float, hinge: Hinge, factor: float) -> tuple[Tensor, Tensor]:
    """:func:`expected_hinges` with label smoothing and ignored labels; the reduction is the caller's."""
    target, weight, smoothing, ignore_index, _ = options
    wide, share = s.dtype == torch.float16, None
    if isinstance(target, LabelMixture) and target.labels.shape[1] == 1 and target.uniform is None:
        share, ignore_index = operand(target.shares[:, 0], s.shape[:1], target.shares.dtype, s.device), NO_LABEL
        target = target.labels[:, 0]
    if isinstance(target, LabelMixture) or smoothing or target.is_floating_point():
        if k <= ONE_KERNEL_LARGEST_K or not isinstance(target, LabelMixture) or target.uniform is not None:
            return _of_distributions(s, options, k, theta, hinge, factor)
        labels = map(LabelMixture, target.labels.split(1, 1), target.shares.split(1, 1))
        (value, gradient), *others = (
            hinges(s, options._replace(target=one), k, theta, hinge, factor) for one in labels
        )
        for of_one, slope in others:
            value, gradient = value.add_(of_one), gradient.add_(slope)
        return value, gradient
    rows = Rows.of(s)
    out, gradient = rows.like(torch.float32 if wide else None)
    return _label_hinges(rows, target, share, ignore_index, k, theta, hinge, weight, factor, out), gradient


def _of_distributions(
    s: Tensor, options: Options, k: int, theta: float, hinge: Hinge, factor: float
) -> tuple[Tensor, Tensor]:
    rows, given, choices = Rows.of(s), *_masses(s, options, hinge, factor)
    value = torch.empty(s.shape[0], dtype=torch.float32, device=s.device)
    out, gradient = rows.like(torch.float32 if s.dtype == torch.float16 else None)
    given |= {"value_ptr": value, **_numbers(hinge.scale, hinge.tau)}
    if s.numel() and k <= ONE_KERNEL_LARGEST_K:
        _targets_in_one_kernel(rows, k, theta, out, None, given | choices)
    elif s.numel():
        if limit_of_flat_rows(k, POWERS_OF_TARGETS) * s.shape[1] >= k:  # else no row is flat
            done = torch.empty_like(value, dtype=torch.int8)
            _targets_in_one_kernel(rows, k, theta, out, done, given | choices)
        else:
            done = _without_mass(options, value, out)
        table = _margins(rows, k, theta, done)
        n, N = s.shape[1], min(TILE, power_of_two(s.shape[1]))
        launch(
            expected.hinges_of_margins, (len(s),), table, value if done is None else done, **given, **choices,
            n=n, N=N, SKIPS=done is not None, **compiled_for(N // 512),
        )  # fmt: skip
        _margins_backward(table, rows, k, theta, out, done)
    return value, gradient


def _masses(s: Tensor, options: Options, hinge: Hinge, factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A target with alpha and weight as kernels take them, and the constants that go with it."""
    (B, n), device = s.shape, s.device
    target, weight, smoothing, ignore_index, _ = options
    alpha = operand(hinge.alpha, hinge.alpha.shape, hinge.alpha.dtype, device)
    # what a kernel does not read may be any tensor
    q, labels, shares, even, few, spread = Rows(alpha, n, s.shape), alpha, alpha, alpha, 0, 0.0
    if mixed := isinstance(target, LabelMixture):
        few = target.labels.shape[1]
        labels = operand(target.labels, (B, few), torch.int64, device)
        shares = operand(target.shares, (B, few), target.shares.dtype, device)
        even = alpha if target.uniform is None else operand(target.uniform, (B,), target.uniform.dtype, device)
    elif target.is_floating_point():
        q = Rows.of(Masses.of(target, n, smoothing=smoothing).dense(n) if smoothing else target)
    else:
        few, labels = 1, _labels(target, B, device)
        factor, spread = factor * (1 - smoothing), factor * smoothing / n
    weighted = alpha if weight is None else operand(weight, (n,), weight.dtype, device)
    tensors = {"q_ptr": q.memory, "label_ptr": labels, "share_ptr": shares, "even_ptr": even}
    numbers = {"factor": float(factor), "even": float(spread), "ignore_index": ignore_index}
    choices = {
        "DENSE": not few, "M": few, "MIXED": mixed, "EVEN": even is not alpha or spread != 0, "SQ": q.step,
        "PER_CLASS": alpha.ndim > 0, "WEIGHTED": weight is not None,
    }  # fmt: skip
    return tensors | numbers | {"alpha_ptr": alpha, "weight_ptr": weighted}, choices


def _without_mass(options: Options, value: Tensor, gradient: Rows) -> Tensor | None:
    """Do the rows that cost nothing, and mark them; None if there can be none."""
    target = options.target
    if isinstance(target, LabelMixture):
        empty = (target.shares == 0).all(1)
        empty = empty if target.uniform is None else empty & (target.uniform == 0)
    elif target.is_floating_point() or options.ignore_index == NO_LABEL:
        return None
    else:
        empty = target == options.ignore_index
    value.zero_()
    gradient.memory.zero_()
    return empty.to(torch.int8)


def _labels(label: Tensor, B: int, device: torch.device) -> Tensor:
    return operand(laid_out(label, torch.int64), (B,), torch.int64, device)


def _targets_in_one_kernel(
    s: Rows, k: int, theta: float, gradient: Rows, done: Tensor | None, given: dict[str, Any]
) -> None:
    """Work on all rows, or with ``done`` on flat rows alone, which are marked there."""
    B, n = s.shape
    theta, low = _two_singles(theta)
    J = k if done is None else min(k, POWERS_OF_TARGETS)
    sizes = {"k": k, "J": J, "TP": power_of_two(3 * k + 5), **tiles(n, s.step, s.memory.element_size())}
    launch(
        expected.target_rows, (-(-B // sizes["R"]),), s.memory, gradient_ptr=gradient.memory,
        done_ptr=gradient.memory if done is None else done, B=B, depth=k, theta=theta, theta_low=low,
        inverse=1 / (theta + low), LIMIT=limit_of_flat_rows(k, J), SEARCH=done is None, **given, **sizes,
    )  # fmt: skip


def _label_hinges(
    s: Rows, label: Tensor, share: Tensor | None, ignore_index: int, k: int, theta: float, hinge: Hinge,
    weight: Tensor | None, factor: float, gradient: Rows,
) -> Tensor:  # fmt: skip
    """The values of the hinges [B]; the gradient is written into its memory."""
    device = s.memory.device
    alpha = operand(hinge.alpha, hinge.alpha.shape, hinge.alpha.dtype, device)
    value = torch.empty(s.shape[0], dtype=torch.float32, device=device)
    of_classes = alpha if weight is None else operand(weight, s.shape[1:], weight.dtype, device)
    tensors = {"alpha_ptr": alpha, "weight_ptr": of_classes, "share_ptr": value if share is None else share}
    numbers = {"factor": float(factor), **_numbers(hinge.scale, hinge.tau)}
    uses = {"HINGE": True, "PER_CLASS": alpha.ndim > 0, "WEIGHTED": weight is not None, "SHARED": share is not None}
    _at_labels(s, label, k, theta, value, gradient, tensors | numbers | uses, ignore_index)
    return value


@lru_cache(maxsize=64)
def _numbers(scale: float, tau: float) -> Mapping[str, float]:
    """The numbers of a hinge as kernels take them. tau multiplies once: it is rounded as the value is."""
    tau = invertible(tau, torch.float32)
    (scale, scale_low), (inverse, inverse_low) = _two_singles(scale), _two_singles(1 / tau)
    return {
        "scale": scale, "scale_low": scale_low, "tau": tau, "inverse_tau": inverse, "inverse_tau_low": inverse_low
    }  # fmt: skip


def _at_labels(
    s: Rows, label: Tensor, k: int, theta: float, value: Tensor, gradient: Rows, hinge: dict[str, Any],
    ignore_index: int = NO_LABEL,
) -> None:  # fmt: skip
    """Write the margins, or the values of the hinge, and their gradient."""
    label, ignores = _labels(label, s.shape[0], value.device), ignore_index != NO_LABEL
    if s.shape.numel():
        in_one = hinge | {"IGNORES": ignores, "ignore_index": ignore_index if ignores else 0}
        if k <= ONE_KERNEL_LARGEST_K:
            _in_one_kernel(s, label, k, theta, value, gradient, None, in_one)
            return
        if limit_of_flat_rows(k, POWERS) * (s.shape[1] - 1) >= k:  # else no row is flat
            done = torch.empty_like(label, dtype=torch.int8)
            _in_one_kernel(s, label, k, theta, value, gradient, done, in_one)
        else:
            done = _without_mass(Options(label, None, 0.0, ignore_index, Reduction.NONE), value, gradient)
        _label_in_passes(s, label, k, theta, value, gradient, done, hinge)


def margins(s: Tensor, k: int, theta: float) -> Tensor:
    """The margins theta l of every class, in single precision: [B, n] -> [B, n]."""
    return _margins(Rows.of(s), k, theta) if s.numel() else s.new_empty(s.shape, dtype=torch.float32)


def margins_backward(g: Tensor, s: Tensor, k: int, theta: float) -> Tensor:
    """The product of g with the derivatives of :func:`margins`: [B, n], [B, n] -> [B, n] in the dtype of the scores."""
    g, out = operand(g, s.shape, torch.float32, s.device), s.new_empty(s.shape)
    if s.numel():
        _margins_backward(g, Rows.of(s), k, theta, Rows.of(out), None)
    return out


def _margins(s: Rows, k: int, theta: float, done: Tensor | None = None) -> Tensor:
    """The margins of the rows that are not ``done``."""
    out = s.memory.new_empty(s.shape, dtype=torch.float32)
    top, where, _, state, in_top, _ = _solved_margins(s, None, k, theta, done)
    grid, tile = _tiles(s.shape)
    launch(
        all_classes.finish_margins, grid, s.memory, top if done is None else done, top, where, state, in_top, out,
        s.shape[1], s.step, theta, 1 / theta, SKIPS=done is not None, **_group(k, k + 1), **tile,
    )  # fmt: skip
    return out


def _margins_backward(g: Tensor, s: Rows, k: int, theta: float, out: Rows, done: Tensor | None) -> None:
    (B, n), inverse, group, KP = s.shape, 1 / theta, _group(k, k + 1), power_of_two(k + 1)
    top, where, b, state, _, of_top = _solved_margins(s, g, k, theta, done)
    grid, tile = _tiles(s.shape)
    products, H, W = torch.empty_like(of_top), top.new_empty(B, 2, k), top.new_empty(*grid, k)
    skips, done = {"SKIPS": done is not None}, top if done is None else done
    launch(
        all_classes.sum_cotangents, grid, s.memory, done, g, top, where, state, W, n, s.step, inverse,
        k=k, T=group["T"], **tile, **skips,
    )  # fmt: skip
    launch(
        all_classes.solve_cotangents, (B, 2), done, top, where, b, W.sum(1), of_top, g, state, H, products, n, inverse,
        KP=KP, **group, **_lanes(group), **skips,
    )  # fmt: skip
    launch(
        all_classes.finish_cotangents, grid, s.memory, done, g, top, where, state, H, products.sum(1), out.memory,
        n, s.step, out.step, inverse, **group, **tile, **skips,
    )  # fmt: skip


def _solved_margins(s: Rows, g: Tensor | None, k: int, theta: float, done: Tensor | None) -> tuple[Tensor, ...]:
    """Solve each row for the last passes over all classes.

    Returns its top group, the polynomials' coefficients, and the margins of the top group or, with cotangents g, the
    polynomials that carry them.
    """
    (B, n), group, KP = s.shape, _group(k, k + 1), power_of_two(k + 1)
    top, where, sums = _top_and_sums(s, None, theta, k, k, group["T"], done)
    b, state, in_top = top.new_empty(B, 4, KP), top.new_empty(B, k + 4), torch.empty_like(top)
    of_top = in_top if g is None else top.new_empty(B, 2, group["T"])
    solving = {"KP": KP, "BACKWARD": g is not None, "SKIPS": done is not None, **group, **_lanes(group)}
    g, done = top if g is None else g, top if done is None else done
    launch(
        all_classes.solve_margins, (B,), done, top, where, sums, b, g, state, in_top, of_top, n, theta, 1 / theta,
        **solving,
    )  # fmt: skip
    return top, where, b, state, in_top, of_top


@cache
def limit_of_flat_rows(k: int, powers: int) -> float:
    """Return the largest odds of a flat row for which this number of power sums is enough.

    Balanced odds are at most v = w / (1 - w), and neighbouring coefficients differ by a factor of at most 1 + v. All
    later power sums together would change c_k by less than its part k (1 + v) v^J / ((J + 1) (1 - v)), J = powers,
    which is to be below rounding.
    """
    if k <= powers:
        return 0.5
    low, high = 0.0, 0.5
    for _ in range(30):
        v = (low + high) / 2
        small = k * (1 + v) * v**powers / ((powers + 1) * (1 - v)) < 2**-26
        low, high = (v, high) if small else (low, v)
    return low / (1 + low)


def _in_one_kernel(
    s: Rows, label: Tensor, k: int, theta: float, value: Tensor, gradient: Rows, done: Tensor | None,
    hinge: dict[str, Any],
) -> None:  # fmt: skip
    """Work on all rows, or with ``done`` on flat rows alone, which are marked there."""
    B, n = s.shape
    J = k if done is None else min(k, POWERS)
    sizes = tiles(n, s.step, s.memory.element_size())
    launch(
        one_label.label_rows, (-(-B // sizes["R"]),), s.memory, label, value, gradient.memory,
        label if done is None else done, B, SEARCH=done is None, **hinge, **_of_label_rows(k, J, theta), **sizes,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _of_label_rows(k: int, J: int, theta: float) -> Mapping[str, Any]:
    """Numbers and constants of a kernel."""
    theta, low = _two_singles(theta)
    return {
        "depth": k, "theta": theta, "theta_low": low, "inverse": 1 / (theta + low), "k": k,
        "TP": power_of_two(3 * k + 2), "J": J, "LIMIT": limit_of_flat_rows(k, J),
    }  # fmt: skip


def _label_in_passes(
    s: Rows, label: Tensor, k: int, theta: float, value: Tensor, gradient: Rows, done: Tensor | None,
    hinge: dict[str, Any],
) -> None:  # fmt: skip
    """Work on the rows that are not ``done``."""
    (B, n), inverse, group, KP = s.shape, 1 / theta, _group(k, k), power_of_two(k + 1)
    top, where, sums = _top_and_sums(s, label, theta, k, k - 1, group["T"], done)
    b, state, in_top = top.new_empty(B, 2, KP), top.new_empty(B, k + 3), torch.empty_like(top)
    skips, done = {"SKIPS": done is not None}, label if done is None else done
    launch(
        passes.solve_label, (B,), s.memory, label, done, top, sums, b, value, state, in_top, n, s.step,
        *_two_singles(theta), inverse, KP=KP, **hinge, **group, **_lanes(group), **skips,
    )  # fmt: skip
    grid, tile = _tiles(s.shape)
    launch(
        passes.finish_label, grid, s.memory, label, done, top, where, state, in_top, gradient.memory, n, s.step,
        inverse, **group, **tile, **skips,
    )  # fmt: skip


def _top_and_sums(
    s: Rows, label: Tensor | None, theta: float, k: int, rank: int, T: int, done: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Of each row the T largest scores, their classes, and the power sums of the rest: [B, T], [B, T], [B, k].

    The odds are relative to the largest score but ``rank``. Without the label, where there is one.
    """
    (B, n), N = s.shape, min(_longest(s), power_of_two(s.shape[1]))
    segments = -(-n // N)
    top = s.memory.new_empty(B, segments, T, dtype=torch.float32)
    where = torch.empty_like(top, dtype=torch.int32)
    choices = {"WITHOUT_LABEL": label is not None, "SKIPS": done is not None}
    label = where if label is None else label
    done = label if done is None else done
    launch(
        passes.select, (B, segments), s.memory, label, done, top, where, n, s.step, T=T, N=N, **choices,
        **compiled_for(N // 1024),
    )  # fmt: skip
    if segments > 1:  # stable: ties stay in the order of classes
        top, order = (x[:, :T].contiguous() for x in top.flatten(1).sort(stable=True, dim=1, descending=True))
        where = where.flatten(1).gather(1, order)
    grid, tile = _tiles(s.shape)
    sums = top.new_empty(*grid, k)
    launch(
        passes.sum_tail, grid, s.memory, label, done, top, where, sums, n, s.step, 1 / theta, k=k, T=T,
        REFERENCE=rank, **choices, **tile,
    )  # fmt: skip
    return top, where, sums.sum(1)


def _group(k: int, depth: int) -> dict[str, int]:
    """Sizes of the top group, and of the vector of its lanes, which has one to spare."""
    T = 2 * depth + 1
    return {"k": k, "T": T, "TP": power_of_two(T + 1)}


def _lanes(group: dict[str, int]) -> dict[str, int | bool]:
    return compiled_for(group["TP"] // 32)  # one a thread


def _tiles(shape: torch.Size) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Programs that share out the rows [B, tiles], and their options."""
    B, n = shape
    N = min(TILE, power_of_two(n))
    return (B, -(-n // N)), {"N": N, **compiled_for(N // 512)}


def _longest(s: Rows) -> int:
    return SCORES_A_PROGRAM * 4 // s.memory.element_size()


def _two_singles(theta: float) -> tuple[float, float]:
    """A number as the sum of two that fit into single precision, in which kernels are given theirs."""
    (high,) = unpack("f", pack("f", theta))
    return high, theta - high


class HingeRows:
    """The smooth top-k SVM as a kernel of row losses, see :class:`topk_registry.ops.rows.api.Kernel`."""

    def __init__(self, k: int, tau: float) -> None:
        self.k, self.tau = k, tau
        self.theta = invertible(k * tau, torch.float32)  # as in request.py

    def run(
        self, own: Own, options: Options, scores: Tensor, wanted: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradient is written in any case."""
        target, weight, _, ignore_index, reduction = options
        (alpha,), (B, n) = own, scores.shape
        assert alpha is not None
        alpha = alpha if alpha.device == scores.device else alpha.to(scores.device)
        hinge = Hinge(alpha, 1 / self.k, self.tau)
        losses, gradient = hinges(scores, options, self.k, self.theta, hinge, part_of_row(reduction, B))
        label = None
        if not (isinstance(target, LabelMixture) or target.is_floating_point()):
            label = _labels(target, B, scores.device)
        value, left = reduced(losses, label, weight, n, ignore_index, reduction)
        return value, gradient if wanted else None, left


@lru_cache(maxsize=64)
def loss_kernel(k: int, tau: float) -> HingeRows:
    """Return the kernel of the smooth top-k SVM."""
    return HingeRows(k, tau)


kernels = Kernels(label_margins, margins, margins_backward, expected_hinges)
