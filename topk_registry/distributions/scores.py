"""Scores that distributions over sets are made from: their checks and their precision."""

import math

from torch import Tensor

from topk_registry.ops.values import number


def check_scores(logits: Tensor, temperature: float) -> None:
    """Raise unless logits are floating point [..., n] and the temperature is positive and finite."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim < 1:
        got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else repr(logits)
        raise ValueError(f"logits must be floating point [..., n], got {got}")
    number(temperature, "temperature", above=0)


def check_numbers(logits: Tensor, k: Tensor | int) -> None:
    """Raise unless every row has k logits above -inf, and none that is inf or NaN."""
    possible = (logits > -math.inf).sum(-1)
    if bool((possible < k).any()) or bool((logits == math.inf).any()) or bool(logits.isnan().any()):
        raise ValueError("every row needs k logits above -inf, and none that is inf or NaN")


def scaled(logits: Tensor, temperature: float, origin: Tensor) -> Tensor:
    """(logits - origin) / temperature in double precision; digits are kept where the origin is one of the logits."""
    return (logits.double() - origin.double()) / temperature
