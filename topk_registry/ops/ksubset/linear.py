"""A linear classifier and the k-subset operator in one: scores exist a chunk of classes at a time.

The forward pass streams the state of each row over the chunks. The backward pass makes the scores of each chunk again,
turns them into their gradient in place and multiplies that into the gradients of features, weight and bias. Beside
those, and whatever the number of classes, the memory is one chunk [B, chunk].
"""

import math
from collections.abc import Iterator
from numbers import Integral

import torch
from torch import Tensor

from topk_registry.ops.ksubset.autograd import once
from topk_registry.ops.ksubset.dispatch import check_k, check_temperature
from topk_registry.ops.ksubset.streaming import State, finish, gradient, merge, put, summarise

SCORES = {"cpu": 1 << 20}  # in a chunk: few enough to stay in the cache; elsewhere enough to keep the device busy


def linear_label_margins(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    label: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """``topk_label_margins(F.linear(features, weight, bias), label, k)`` without the logits as a whole.

    Args:
        features: [B, d].
        weight: [n, d], one row a class.
        bias: [n] or None.
        label: class indices [B], int64.
        k, temperature: as in :func:`topk_margins`.
        chunk: classes at a time; by default what the device is quick with.

    Returns:
        Margins [B] in double precision, differentiable once to features, weight and bias. Under autocast the matrix
        products are in half precision as those of ``F.linear``, the rest in single.

    Example:
        >>> features, weight = torch.randn(8, 64), torch.randn(1000, 64)
        >>> linear_label_margins(features, weight, None, torch.arange(8), 5).shape
        torch.Size([8])
    """
    _check(features, weight, bias, label)
    n = weight.shape[0]
    check_k(k, n)
    check_temperature(temperature)
    if chunk is None:
        chunk = default_chunk(features, k)
    elif isinstance(chunk, bool) or not isinstance(chunk, Integral) or chunk < 1:
        raise ValueError(f"chunk must be a number of classes of at least 1, got {chunk!r}")
    margin, top, _, _ = _forward(features, weight, bias, label, int(k), float(temperature), int(chunk), dtype)
    return margin


def default_chunk(features: Tensor, k: int) -> int:
    """Classes at a time: a cacheful of scores on the CPU, many times the top group everywhere."""
    scores = SCORES.get(features.device.type, 1 << 24)
    return max(scores // max(len(features), 1), 1024, 8 * k)
