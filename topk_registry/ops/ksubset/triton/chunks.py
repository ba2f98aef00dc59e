"""State and gradient of a chunk of classes on GPUs, a kernel each: the functions of these names in torch/state.py."""

from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.gpu.layout import compiled_for, power_of_two
from topk_registry.ops.hinge import invertible
from topk_registry.ops.ksubset.graph import Coefficients, State
from topk_registry.ops.ksubset.triton import chunk_targets, streams
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.tensors import launch, operand

TAKES_HALF = True  # scores of a chunk may be in half precision; gradients are then too
TILE = 4096  # scores that a program works on together
TILE_OF_TARGETS = 1024  # fewer, as each carries k + 2 sums


def summarise(s: Tensor, k: int, theta: float, first_class: int = 0, out: Tensor | None = None) -> State:
    """The state of classes first_class, first_class + 1, ... from their scores s [B, n]; ``out`` is not needed here."""
    state, _ = extend(None, None, s, None, k, theta, first_class)
    n = s.shape[1]
    return State(state.top[:, :n], state.classes[:, :n], state.P)


def extend(
    state: State | None, score: Tensor | None, s: Tensor, label: Tensor | None, k: int, theta: float,
    first_class: int = 0, flat: Tensor | None = None,
) -> tuple[State, Tensor]:  # fmt: skip
    """The state of the classes of ``state`` and of a chunk but the label [B], and the label's score [B].

    They are written into the memory of those given. The state has 2k + 1 classes, however few there are: the others
    have a score of -inf. A NaN makes the power sums NaN.
    """
    (B, n), T = s.shape, 2 * k + 1
    if state is None:
        top = torch.full((B, T), -torch.inf, device=s.device)
        P = torch.zeros(B, k, dtype=torch.float64, device=s.device)
        state = State(top, torch.full_like(top, -1, dtype=torch.int64), P.T)
    if score is None:
        score = torch.full_like(state.top[:, 0], torch.nan)
    if s.numel():
        known = state.classes if label is None else operand(label, (B,), torch.int64, s.device)
        N, TP = _tile(n), power_of_two(T)
        launch(
            streams.extend_state, (B,), s, known, state.top, state.classes, state.P.T, score, n, first_class, 1 / theta,
            k=k, T=T, TP=TP, N=N, WITHOUT_LABEL=label is not None, **compiled_for(N // 512),
        )  # fmt: skip
    return state, score


def gradient(
    s: Tensor, label: Tensor, f: Coefficients, theta: float, g: Tensor, first_class: int = 0, flat: Tensor | None = None
) -> Tensor:
    """g [B] times the gradient of the label's margin to the scores of a chunk [B, m], labels [B] among all classes.

    It is written into the first numbers of ``flat``, which may be those of s.
    """
    (B, n), k, T = s.shape, len(f.c) - 1, f.classes.shape[1]
    out = torch.empty_like(s) if flat is None else flat[:-1].view(s.shape)
    numbers = (t.contiguous() for t in (g, f.a, f.scale, f.c, f.classes, f.in_top))
    label = operand(label, (B,), torch.int64, s.device)
    if s.numel():
        N, TP = _tile(n), power_of_two(T)
        launch(
            streams.chunk_gradient, (B, -(-n // N)), s, label, *numbers, out, B, n, first_class, 1 / theta,
            k=k, T=T, TP=TP, N=N, **compiled_for(N // 512),
        )  # fmt: skip
    return out


class OfTargets:
    """The hinges of a target that is a distribution or a mixture of labels, a chunk at a time.

    Args:
        target: a distribution [B, m] over this process's classes, or labels counted from its first.
        costs: alpha, the weight of each class, tau and k, see :mod:`topk_registry.ops.ksubset.chunked.soft_targets`.
        top, classes: the top group's scores and classes [B, T].
        f: the margins of the top group, and what all margins of the tail share.
        p: the problem, see :mod:`topk_registry.ops.ksubset.chunked.layer`.
    """

    def __init__(self, target: Tensor | LabelMixture, costs: Any, f: Any, top: Tensor, classes: Tensor, p: Any) -> None:
        def single(t: Tensor) -> Tensor:
            return t.detach().float().contiguous()

        self.sign = p.sign
        mixture = isinstance(target, LabelMixture)
        labels, shares, uniform = target if mixture else (None, None, None)
        even = None if uniform is None else single(uniform / p.n)
        tensors = {
            "q_ptr": None if mixture else target.detach().resolve_neg().contiguous(),
            "label_ptr": None if labels is None else labels.contiguous(),
            "share_ptr": None if shares is None else single(shares),
            "even_ptr": even, "weight_ptr": None if costs.weight is None else single(costs.weight),
            "alpha_ptr": single(costs.alpha), "class_ptr": classes.contiguous(), "kth_ptr": single(top[:, p.k - 1]),
            "next_ptr": single(top[:, p.k]), "c_ptr": single(f.c), "scale_ptr": single(f.scale),
            "shift_ptr": single(f.shift),
        }  # fmt: skip
        self.in_top = single(f.in_top)
        self.given = {name: self.in_top if one is None else one for name, one in tensors.items()}
        tau = invertible(costs.tau, torch.float32)
        T = top.shape[1]
        self.given |= {
            "theta": p.theta, "inverse": 1 / p.theta, "of_margin": p.sign / costs.k, "tau": tau, "inverse_tau": 1 / tau,
            "k": p.k, "T": T, "TP": power_of_two(T), "DENSE": not mixture, "SQ": 0 if mixture else target.shape[1],
            "M": 0 if labels is None else labels.shape[1], "EVEN": even is not None,
            "PER_CLASS": costs.alpha.ndim > 0, "WEIGHTED": costs.weight is not None,
        }  # fmt: skip

    def add_costs(self, sums: Tensor, s: Tensor, first: int) -> None:
        """Add to sums [B, 1 + (k + 1) + T]: the costs of a chunk's classes, and the cotangents of c and of the top
        group's margins. The scores s [B, m] are used up."""
        if s.numel():
            launch(
                chunk_targets.sum_costs, (len(s),), s, in_top_ptr=self.in_top, sums_ptr=sums, **self._sizes(s, first)
            )

    def slopes(self, s: Tensor, first: int, g: Tensor, at_top: Tensor, at_P: Tensor) -> Tensor:
        """The gradient of a chunk's scores s [B, m], in their memory, for cotangents g [B] of the costs; at_top [B, T]
        is that of the top group's scores, and at_P [k, B] that to the power sums."""
        if s.numel():
            sizes = self._sizes(s, first)
            launch(
                chunk_targets.chunk_slopes, (len(s), -(-s.shape[1] // sizes["N"])), s, g_ptr=g, at_top_ptr=at_top,
                at_P_ptr=at_P, sign=self.sign, **sizes,
            )  # fmt: skip
        return s

    def _sizes(self, s: Tensor, first: int) -> dict[str, Any]:
        (B, n), N = s.shape, min(TILE_OF_TARGETS, max(64, power_of_two(s.shape[1])))
        return self.given | {"B": B, "n": n, "first": first, "N": N, **compiled_for(N // 256)}


def _tile(n: int) -> int:
    return min(TILE, max(64, power_of_two(n)))
