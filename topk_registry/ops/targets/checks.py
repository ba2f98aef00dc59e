"""Check scores, targets and class weights at the door of a public function."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.tensors import Route, route
from topk_registry.ops.values import numbers

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_tensor(given: Any, name: str) -> None:
    """Raise a TypeError unless an argument is a tensor, with what is likely meant."""
    if isinstance(given, Tensor):
        return
    if hasattr(given, "logits") or (isinstance(given, Mapping) and "logits" in given):
        hint = "pass its logits"
    elif isinstance(given, (tuple, list)) and any(isinstance(one, Tensor) for one in given):
        hint = "pass one of its tensors"
    else:
        hint = "torch.as_tensor makes one of numbers"
    raise TypeError(f"{name} must be a tensor, got {type(given).__name__}: {hint}")


def check_logits(logits: Tensor, name: str = "logits") -> None:
    """Raise unless logits are floating point [B, n], n >= 2."""
    check_tensor(logits, name)
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"{name} must be floating point [batch, classes] with at least 2 classes, "
            f"got {logits.dtype} {list(logits.shape)}"
        )


def check_device(scores: Tensor, name: str, given: Any) -> None:
    """Raise unless a tensor, or every part of a :class:`LabelMixture`, is on the device of the scores.

    A kernel that is handed the address of a tensor on another device would read foreign memory.
    """
    for part in given if isinstance(given, LabelMixture) else (given,):
        if part is not None and part.device != scores.device:
            raise ValueError(f"{name} must be on the device of the scores, {scores.device}, got one on {part.device}")


def check_target(
    scores: Tensor,
    target: Tensor | LabelMixture,
    *,
    ignore_index: int | None = -100,
    integers: Sequence[torch.dtype] = INTEGERS,
    look: bool = False,
) -> tuple[int, int] | None:
    """Raise unless a target fits scores [B, n]: integers [B] within range, masses [B, n] or a :class:`LabelMixture`.

    Args:
        ignore_index: an index that is allowed beside those of the classes; None for none.
        integers: the types that indices may have.
        look: look at indices on every device.

    Returns:
        The least and the largest index, where they were looked at. That is in plain memory of the CPU only: on a GPU it
        would stall the stream (an index out of range still stops at the gather, as in cross-entropy), and a transform
        or a graph has no numbers to look at.
    """
    mixed = isinstance(target, LabelMixture)
    if not mixed:
        check_tensor(target, "target")
    labels = target.labels if isinstance(target, LabelMixture) else target
    dense = not mixed and labels.is_floating_point()
    if isinstance(target, LabelMixture):
        target.check(len(scores))
    elif labels.shape != (scores.shape if dense else scores.shape[:1]) or not (dense or labels.dtype in integers):
        kinds = "integer" if len(integers) > 1 else str(integers[0]).removeprefix("torch.")
        raise ValueError(
            f"target must be class indices ({kinds}, {list(scores.shape[:1])}) or a distribution (floating point, "
            f"{list(scores.shape)}), got {labels.dtype} {list(labels.shape)}"
        )
    check_device(scores, "target", target)
    if not dense and (look or (labels.device.type == "cpu" and route(scores, labels) is Route.KERNELS)):
        return check_range(target, scores.shape[1], ignore_index)
    return None


def check_range(
    target: Tensor | LabelMixture, n: int, ignore_index: int | None = None, name: str = "target"
) -> tuple[int, int]:
    """Raise unless every label is one of n classes, or, of class indices, the one that is ignored.

    Returns:
        The least and the largest label.
    """
    mixed = isinstance(target, LabelMixture)
    labels = target.labels if isinstance(target, LabelMixture) else target
    low, high = map(int, labels.aminmax()) if labels.numel() else (0, 0)
    if low >= 0 and high < n:
        return low, high
    labels = labels.long()  # an ignore_index of -100 would be compared with bytes as 156
    wrong = (labels < 0) | (labels >= n)
    if not mixed and ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        allowed = "" if mixed or ignore_index is None else f" (or ignore_index = {ignore_index})"
        name = "labels of a LabelMixture" if mixed else name
        raise ValueError(f"{name} must be in [0, {n - 1}]{allowed}, got {labels[wrong][0].item()}")
    return low, high


def checked_weight(weight: Tensor | Sequence[float]) -> Tensor:
    """A copy of class weights in double precision, one finite, non-negative factor a class."""
    try:
        return numbers(weight, "weight", at_least=0)
    except ValueError as error:
        if isinstance(weight, str):
            raise ValueError(f"{error}; for weights by name, a trainer has --class-weight") from None
        raise
