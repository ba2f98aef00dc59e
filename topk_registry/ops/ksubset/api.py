"""Margins and marginals of all classes: the checked entrance of the k-subset operator, in blocks of rows."""

from collections.abc import Callable
from numbers import Integral

import torch
from torch import Tensor

from topk_registry.checks import number
from topk_registry.ops.backend import Route, check_dense, route
from topk_registry.ops.ksubset import graph

LEAST_TEMPERATURE = 1e-300  # has a finite reciprocal in double precision; margins already equal their limit at 0
BLOCK = 1 << 24  # approximate number of values that a block of rows stores for its backward pass


def topk_margins(logits: Tensor, k: int, *, temperature: float = 1.0) -> Tensor:
    """Return the margin of each class: its logit minus the k-th largest logit of the other classes, smoothed.

    The margin is temperature * log(p / (1 - p)), where p is the probability that :func:`topk_marginals` returns. As the
    temperature goes to 0, the margin becomes the logit minus the k-th largest logit of the other classes. If at most k
    logits of a row are above -inf, the classes with these logits have the margin inf, and all other classes have the
    margin -inf.

    Args:
        logits: tensor [..., n]. A class with the logit -inf is excluded.
        k: as in "k-th largest logit", 1 <= k <= n - 1.
        temperature: positive number by which the logits are divided.

    Returns:
        Margins [..., n], in double precision for logits in double precision, else in single precision.

    Example:
        >>> topk_margins(torch.tensor([3.0, 2.0, 1.0]), 2, temperature=1e-6)
        tensor([ 2.0000,  1.0000, -1.0000])
    """
    return _of_all_classes(graph.margins, logits, k, temperature)


def topk_log_odds(logits: Tensor, k: int) -> Tensor:
    """For each class, return the log-odds that a random set of k classes contains the class.

    The probability of a set is proportional to the product of e_i = exp(x_i) over the set, where x are the logits. The
    log-odds log(p / (1 - p)) of class i are x_i + log sigma_{k-1}(e without e_i) - log sigma_k(e without e_i). Here
    sigma_j is the j-th elementary symmetric polynomial: the sum, over all sets of j numbers, of the product of the
    numbers. The results are exact up to rounding errors, and differentiable.

    Args:
        logits: tensor [..., n]. A class with the logit -inf is excluded.
        k: number of classes in a set, 1 <= k <= n - 1.

    Returns:
        Log-odds [..., n], in double precision for logits in double precision, else in single precision.

    Example:
        >>> topk_log_odds(torch.zeros(4), 1)
        tensor([-1.0986, -1.0986, -1.0986, -1.0986])

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    return topk_margins(logits, k)


def topk_marginals(logits: Tensor, k: int, *, temperature: float = 1.0) -> Tensor:
    """For each class, return the probability that a random set of k classes contains the class.

    The probability of a set is proportional to exp((sum of the logits of the set) / temperature). The probabilities of
    all classes of a row sum to k. For k = 1, the result is softmax(logits / temperature). If at most k logits of a row
    are above -inf, the classes with these logits have probability 1, and all other classes have probability 0.

    Args:
        logits: tensor [..., n]. A class with the logit -inf is excluded.
        k: number of classes in a set, 1 <= k <= n - 1.
        temperature: positive number by which the logits are divided.

    Returns:
        Probabilities [..., n], in double precision for logits in double precision, else in single precision.

    Example:
        >>> topk_marginals(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2).sum()
        tensor(2.0000)
    """
    return _of_all_classes(graph.marginals, logits, k, temperature)


def topk_label_margins(logits: Tensor, label: Tensor, k: int, *, temperature: float = 1.0) -> Tensor:
    """Return the margin of each row's label in double precision [B]. :func:`topk_margins` defines the margin.

    Args:
        logits: tensor [B, n].
        label: class indices [B], int64.
        k, temperature: as in :func:`topk_margins`.
    """
    check(logits, k, temperature)
    if label.dtype != torch.int64 or label.shape != logits.shape[:1] or logits.ndim != 2:
        raise ValueError(
            f"expected logits [B, n] and int64 labels [B], got {list(logits.shape)} and {label.dtype} "
            f"{list(label.shape)}"
        )
    return topk_margins(logits.double(), k, temperature=temperature).gather(1, label[:, None])[:, 0]


def _of_all_classes(function: Callable[..., Tensor], logits: Tensor, k: int, temperature: float) -> Tensor:
    check(logits, k, temperature)
    n = logits.shape[-1]
    rows = logits.reshape(-1, n)
    rows = rows.to(working_dtype(rows, k, temperature))
    out = in_blocks(function, rows, k, max(float(temperature), LEAST_TEMPERATURE))
    return out.to(output_dtype(logits)).reshape(logits.shape)


def output_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def check(logits: Tensor, k: int, temperature: float) -> None:
    """Raise a ValueError if an argument is invalid.

    The logits must be a dense floating-point tensor [..., n]. k must be an integer from 1 to n - 1. The temperature
    must be positive and finite.
    """
    check_dense(logits, "logits")
    if not logits.is_floating_point() or logits.ndim < 1:
        raise ValueError(f"logits must be floating point [..., n], got {logits.dtype} {list(logits.shape)}")
    n = logits.shape[-1]
    if (type(k) is not int and (isinstance(k, bool) or not isinstance(k, Integral))) or not 1 <= k < n:
        raise ValueError(f"k must be an integer from 1 to n - 1 = {n - 1}, got {k!r}")
    number(temperature, "temperature", above=0)


def working_dtype(s: Tensor, k: int, temperature: float) -> torch.dtype:
    """Return the dtype in which PyTorch operations compute the margins of the logits s [B, n].

    The dtype is single precision if the logits are on a GPU and not in double precision, min(k, n - k) is at most 64,
    and the temperature is between 1e-30 and 1e30. Otherwise, the dtype is double precision.
    """
    small = min(k, s.shape[1] - k) <= graph.SMALL_K and 1e-30 < temperature < 1e30
    return torch.float32 if s.is_cuda and small and s.dtype != torch.float64 else torch.float64


def in_blocks(function: Callable[..., Tensor], s: Tensor, k: int, temperature: float) -> Tensor:
    """Return ``function(s, k, temperature)`` [B, n] for logits s [B, n], computed for one block of rows at a time.

    To limit memory, the function is called for each block in the forward pass, and again in the backward pass.
    Therefore, the result for a row must depend only on this row. Logits that fit in one block are not divided.
    """
    if len(blocks_of_rows(s, k)) == 1 or route(s) is not Route.KERNELS:
        return function(s, k, temperature)
    return _InBlocks.apply(s, k, lambda rows: function(rows, k, temperature))  # pyright: ignore[reportReturnType]


def blocks_of_rows(s: Tensor, k: int) -> list[slice]:
    """Divide the rows of logits s [B, n] into blocks whose backward pass stores about BLOCK values."""
    size = min(k, s.shape[1] - k)
    step = max(1, BLOCK // (s.shape[1] * (3 * size + 20)))
    return [slice(i, i + step) for i in range(0, max(1, len(s)), step)]


class _InBlocks(torch.autograd.Function):
    """Apply a function to blocks of rows. The backward pass calls the function again, so only the logits are saved."""

    @staticmethod
    def forward(ctx, s: Tensor, k: int, function: Callable[[Tensor], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.k, ctx.function = k, function
        ctx.save_for_backward(s)
        return torch.cat([function(s[rows]) for rows in blocks_of_rows(s, k)])

    @staticmethod
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (s,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return by_definition(ctx.function, s, g), None, None
        blocks = blocks_of_rows(s, ctx.k)
        return torch.cat([by_definition(ctx.function, s[rows], g[rows]) for rows in blocks]), None, None


def by_definition(definition: Callable[[Tensor], Tensor], logits: Tensor, g: Tensor) -> Tensor:
    """Propagate the gradient ``g`` back through ``definition(logits)``: return the gradient of the logits [B, n].

    ``definition(logits)`` returns losses [B]. ``g`` is the gradient with respect to these losses [B], or with respect
    to their sum []. If gradients are enabled, the result is differentiable with respect to ``logits`` and ``g``.
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        s = logits if differentiable else logits.detach().requires_grad_()
        losses = definition(s)
        return torch.autograd.grad(losses, s, g.expand_as(losses), create_graph=differentiable)[0]
