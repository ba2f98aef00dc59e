"""State and gradient of a chunk of classes on GPUs, a kernel each: the functions of these names in chunked/state.py."""

import torch
from torch import Tensor

from topk_registry.ops.ksubset.torch.rows import Coefficients, State
from topk_registry.ops.ksubset.triton import streams
from topk_registry.ops.tensors import launch, operand

TILE = 4096  # scores that a program works on together


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
        N, TP = _tile(n), _power_of_two(T)
        launch(
            streams.extend_state, (B,), s, known, state.top, state.classes, state.P.T, score, n, first_class, 1 / theta,
            k=k, T=T, TP=TP, N=N, WITHOUT_LABEL=label is not None, num_warps=max(1, N // 512), enable_fp_fusion=True,
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
        N, TP = _tile(n), _power_of_two(T)
        launch(
            streams.chunk_gradient, (B, -(-n // N)), s, label, *numbers, out, B, n, first_class, 1 / theta,
            k=k, T=T, TP=TP, N=N, num_warps=max(1, N // 512), enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _tile(n: int) -> int:
    return min(TILE, max(64, _power_of_two(n)))


def _power_of_two(n: int) -> int:
    return 1 << max(1, n - 1).bit_length()
