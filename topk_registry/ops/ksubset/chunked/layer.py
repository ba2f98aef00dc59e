"""A linear layer, or scores, a chunk of classes at a time: the scores of a chunk, the states of rows, the gradients.

The forward pass streams the state of each row over the chunks. The backward pass makes the scores of a chunk again,
turns them into their gradient in place, and multiplies that into the gradients of features, weight and bias. Beside
those the memory is that of a chunk, whatever the number of classes.
"""

from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.ksubset.request import prepare
from topk_registry.ops.ksubset.torch import state as streaming
from topk_registry.ops.ksubset.torch.state import State, merge_all
from topk_registry.ops.process_group import Group


def as_rows(like: Tensor, n: int, k: int, temperature: float) -> tuple[Tensor, int, float, int]:
    """Prepare arguments for n scores of a dtype: no rows [0, n] to work in, k with 2k <= n, theta, the scores' sign."""
    return prepare(like.new_empty(0, n), k, temperature)


def kernels(like: Tensor, k: int) -> ModuleType:
    """Return the module whose ``summarise``, ``extend`` and ``gradient`` serve here."""
    return streaming


def score_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, like: Tensor, sign: int = 1
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """For each chunk its first class, its rows of the weight, and its scores [B, chunk], times sign: as the flat memory
    that ``streaming.put`` takes, and as the view of it. The memory is used again for the next one."""
    B, n = len(x), len(weight)
    memory = like.new_empty(B * min(chunk, n) + 1)
    for first in range(0, n, chunk):
        W = weight[first : first + chunk].to(x.dtype)
        b = None if bias is None else bias[first : first + chunk].to(x.dtype)
        flat = memory[: B * len(W) + 1]
        s = flat[:-1].view(B, len(W))
        multiply(x, W.T, out=s, bias=b)
        yield first, W, flat, s.neg_() if sign < 0 else s


def multiply(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = a b + bias, in one pass where the product has the dtype of its place."""
    if a.dtype != out.dtype:
        out.copy_(F.linear(a, b.T, bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


class LayerUpdate(Protocol):
    """Changes the weight and bias of a layer a chunk at a time, so that their gradients never exist as a whole."""

    def enter(self) -> None:
        """Begin a backward pass; raises where another one has changed the layer since the last step."""

    def backward(self, done: "BackwardPass", wants_features: bool) -> Tensor | None:
        """Return the gradient of the features where it is wanted."""
        ...


class Problem(NamedTuple):
    """Options of the operator and layout of the classes, known to all ranks."""

    group: Group | None  # None where one process has all classes
    n: int  # classes of all ranks
    k: int  # with 2k <= n, as in backends
    theta: float
    sign: int  # of the scores
    like: Tensor  # [0, n] of the dtype to work in
    scores: Tensor  # the same of the dtype of a chunk's scores
    chunk: int
    dtype: torch.dtype  # of products of matrices
    update: LayerUpdate | None = None  # takes the layer's gradients; None: autograd does


class BackwardPass(NamedTuple):
    """The features [B, d] of a backward pass, and the gradients of its scores.

    ``chunks(size)`` gives for each chunk of classes its first class, its rows of the weight [m, d] and the gradient of
    its scores [B, m]. It may be called again while the layer stays as it is.
    """

    x: Tensor
    chunks: Callable[[int], Iterator[tuple[int, Tensor, Tensor]]]
    problem: Problem


def problem(
    like: Tensor,
    n: int,
    k: int,
    temperature: float,
    group: Group | None,
    chunk: int,
    dtype: torch.dtype,
    update: LayerUpdate | None = None,
) -> Problem:
    like, inner_k, theta, sign = as_rows(like, n, k, temperature)
    # a product in half precision stays as it is where kernels can read it, and so does the gradient in its place
    half = dtype.itemsize == 2 and getattr(kernels(like, inner_k + 1), "TAKES_HALF", False)
    scores = like.new_empty(like.shape, dtype=dtype) if half else like
    return Problem(group, n, inner_k, theta, sign, like, scores, chunk, dtype, update)


def chunks_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, p: Problem
) -> Iterator[tuple[int, Any, Tensor, Tensor]]:
    """The chunks of ``score_chunks`` of a layer, or where there is no weight of scores x [B, m], which are copied."""
    if weight is not None:
        yield from score_chunks(x.to(p.dtype), weight, bias, p.chunk, p.scores, p.sign)
    elif x.shape[1]:
        flat = p.like.new_empty(x.numel() + 1)
        s = flat[:-1].view(x.shape).copy_(x)
        yield 0, None, flat, s.neg_() if p.sign < 0 else s


def own_state(x: Tensor, weight: Tensor | None, bias: Tensor | None, k: int, p: Problem) -> State | None:
    """The state of the classes of this rank, for a top group of k; None where it has none."""
    states = [
        kernels(p.like, k).summarise(s, k, p.theta, first, out=s)
        for first, _, _, s in chunks_of(x, weight, bias, p)
    ]  # fmt: skip
    return merge_all(states, p.theta) if states else None


def label_state(
    chunks: Iterable[tuple[int, Any, Tensor, Tensor]], label: Tensor, k: int, theta: float, like: Tensor
) -> tuple[State | None, Tensor]:
    """The state of the classes of all chunks other than the label [B], and the label's score [B].

    The state is None where there is no chunk. The score is NaN where the label is none of the classes.
    """
    state = score = None
    n = 0
    for first, _, flat, s in chunks:
        state, score = kernels(like, k).extend(state, score, s, label, k, theta, first, flat)
        n += s.shape[1]
    if state is None or score is None:
        return None, like.new_full((len(label),), torch.nan)
    return State(state.top[:, :n], state.classes[:, :n], state.P), score


def check_scores(value: Tensor, kth: Tensor, k: int, sign: int) -> None:
    """Raise on a CPU if a row has too few scores; elsewhere its value is NaN.

    Args:
        value: of the rows [B]; with sign 1 a row with too few scores has none that is finite.
        kth: [B], a score times its sign, of a rank that every row must have.
        k: size of the set, as the caller gave it.
        sign: of the scores.
    """
    suspect = value.device.type == "cpu" and (sign < 0 or not isfinite(value.sum()))
    if suspect and bool((kth == -sign * torch.inf).any()):
        raise ValueError(f"every row needs at least k + 1 = {k + 1} scores above -inf, one has fewer")


class Gradients:
    """Gradients of features, weight and bias, added up over chunks from the gradients of their scores."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor, wanted: list[bool]) -> None:
        self.dtype, self.wanted = features.dtype, wanted
        self.sums = like.new_zeros(features.shape if wanted[0] else ())
        self.weight = torch.empty_like(weight) if wanted[1] else None
        self.bias = torch.empty_like(bias) if wanted[2] and bias is not None else None

    def add(self, first: int, ds: Tensor, x: Tensor, W: Tensor) -> None:
        """Add the chunk that starts with the class ``first``: ds [B, m] for features x [B, d] and rows W [m, d]."""
        if self.wanted[0]:
            self.sums += ds @ W
        if self.weight is not None:
            multiply(ds.T, x, out=self.weight[first : first + len(W)])
        if self.bias is not None:
            self.bias[first : first + len(W)] = ds.sum(0)

    def all(self) -> list[Tensor | None]:
        return [self.sums.to(self.dtype) if self.wanted[0] else None, self.weight, self.bias]


def layer_gradients(done: BackwardPass, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> list[Tensor | None]:
    """The gradients of features, weight and bias, None where none is wanted or the problem's update takes it."""
    x, p = done.x, done.problem
    with torch.autocast(x.device.type, enabled=False):
        if p.update is not None:
            return [p.update.backward(done, wanted[0]), None, None]
        gradients = Gradients(x, weight, bias, p.like, wanted)
        for first, W, ds in done.chunks(p.chunk):
            gradients.add(first, ds, x.to(p.dtype), W)
    return gradients.all()
