"""``topk-registry calibrate --score gce-gap``: prediction sets of the classes that are close to the best."""

from dataclasses import dataclass
from typing import Any, ClassVar

from array_api_compat import array_namespace

from topk_registry.oldsets import Score


@dataclass(frozen=True)
class Gap(Score):
    """How far the probability of a class is behind the best one, p_max - p_y.

    Called with numpy arrays and with tensors, so it is written against the Python array API.
    """

    name: ClassVar[str] = "gce_gap"  # that of the entry point

    def __call__(self, values: Any, u: Any = 0.0) -> Any:
        return array_namespace(values).max(values, axis=-1, keepdims=True) - values

    def largest(self, n: int) -> float:
        return 1.0
