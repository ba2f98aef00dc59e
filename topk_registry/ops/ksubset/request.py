"""A call of the k-subset operator: its checks, its precision and its backend.

Backends see rows [B, n] with 2k <= n (backends.py). Other shapes and dtypes, larger k and bad input are settled here.
"""

from __future__ import annotations  # torch 2.8 cannot compile a function in a function that makes a union

from numbers import Integral

import torch
from torch import Tensor

from topk_registry.ops import constant
from topk_registry.ops.constant import fixed_number
from topk_registry.ops.hinge import invertible
from topk_registry.ops.ksubset.backends import OPERATOR
from topk_registry.ops.tensors import check_dense
from topk_registry.ops.values import number

# coefficients span e^k and margins grow with the temperature: both can be more than single precision holds
SINGLE, SINGLE_TEMPERATURE = 64, 1e30


def output_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def prepare(logits: Tensor, k: int, temperature: float, impl: str) -> tuple[Tensor, int, float, int, str]:
    """Rows to work on, with 2k <= n: drawing k classes by x is leaving out n - k by -x, so the log-odds change sign."""
    n, temperature = logits.shape[-1], fixed_number(temperature)
    sign = 1 if 2 * k <= n else -1
    k = fixed(k if sign > 0 else n - k)
    double = logits.dtype == torch.float64 or k > SINGLE
    if (
        temperature > SINGLE_TEMPERATURE
    ):  # a branch, so that a compiled graph, where this is a symbol, has a constant below
        double = True
    backend = constant.choose(OPERATOR, impl, logits.device, k, double)
    half = OPERATOR[backend].takes_half and logits.dtype in (torch.float16, torch.bfloat16)
    s = logits if half else logits.to(torch.float64 if double else torch.float32)
    s = s.reshape(-1, n)
    theta = invertible(float(temperature), torch.float64 if double else torch.float32)
    s = s if sign > 0 else -s
    return s if OPERATOR[backend].takes_strides else s.contiguous(), k, theta, sign, backend


def fixed(k: int) -> int:
    """Return k as a plain int, to choose implementations by: in a graph recompiled for another k it is a symbol."""
    return len(range(k))


def check(logits: Tensor, k: int, temperature: float) -> None:
    check_dense(logits, "logits")
    if not logits.is_floating_point() or logits.ndim < 1:
        raise ValueError(f"logits must be floating point [..., n], got {logits.dtype} {list(logits.shape)}")
    n = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k < n:
        raise ValueError(f"k must be an integer from 1 to n - 1 = {n - 1}, got {k!r}")
    number(temperature, "temperature", above=0)


def check_finite(logits: Tensor, k: int) -> None:
    """A row with too few scores is an error where it is seen, and NaN elsewhere."""
    if not logits.numel() or bool(logits.amin() > -torch.inf):
        return
    scores = (logits != -torch.inf).sum(-1)
    if bool((scores <= k).any()):
        raise ValueError(f"every row needs at least k + 1 = {k + 1} scores above -inf, one has {int(scores.min())}")
