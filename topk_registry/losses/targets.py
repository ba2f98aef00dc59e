"""Check logits, targets and class weights, and reduce losses at index targets as cross-entropy does."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topk_registry.ops.tensors import Route, route

REDUCTIONS = ("none", "mean", "sum")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def label_loss(
    cost: Callable[[Tensor], Tensor],
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    weighted: bool = False,
) -> Tensor:
    """The loss at index targets [B] from ``cost(label [B]) -> [B]``, with cross-entropy's options.

    Args:
        cost: of rows at labels; a row that is ignored is asked for label 0.
        target: int64 class indices [B], or ``ignore_index``.
        weight: one factor a class [n].
        weighted: the costs hold those factors already.
    """
    ignored = target == ignore_index
    label = torch.where(ignored, 0, target)
    loss = cost(label)
    factor = torch.ones_like(loss) if weight is None else weight.to(loss)[label]
    factor = factor.masked_fill(ignored, 0.0)
    loss = (loss if weighted else loss * factor).masked_fill(ignored, 0.0)
    return loss.sum() / factor.sum() if reduction == "mean" else reduce_loss(loss, reduction)


def reduce_loss(loss: Tensor, reduction: str) -> Tensor:
    """The mean or the sum of losses, or the losses."""
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def check_logits(logits: Tensor) -> None:
    """Raise unless logits are floating point [B, n], n >= 2."""
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [batch, classes] with at least 2 classes, "
            f"got {logits.dtype} {list(logits.shape)}"
        )


def check_target(logits: Tensor, target: Tensor, *, ignore_index: int, look: bool = False) -> tuple[int, int] | None:
    """Raise unless target is integer [B] within range, or floating point [B, n].

    Args:
        look: look at indices on every device.

    Returns:
        The least and the largest index, where they were looked at. That is in plain memory of the CPU only: on a GPU it
        would stall the stream (an index out of range still stops at the gather, as in cross-entropy), and a transform
        or a graph has no numbers to look at.
    """
    dense = target.is_floating_point()
    if (dense or target.dtype in INTEGERS) and target.shape == (logits.shape if dense else logits.shape[:1]):
        if not dense and (look or (target.device.type == "cpu" and route(logits, target) is Route.KERNELS)):
            return _check_range(target, logits.shape[1], ignore_index)
        return None
    raise ValueError(
        f"target must be class indices (integer, {list(logits.shape[:1])}) or a distribution "
        f"(floating point, {list(logits.shape)}), got {target.dtype} {list(target.shape)}"
    )


def _check_range(target: Tensor, n: int, ignore_index: int) -> tuple[int, int]:
    low, high = map(int, target.aminmax()) if target.numel() else (0, 0)
    if low >= 0 and high < n:
        return low, high
    target = target.long()  # an ignore_index of -100 would be compared with bytes as 156
    wrong = ((target < 0) | (target >= n)) & (target != ignore_index)
    if wrong.any():
        raise ValueError(
            f"target must be in [0, {n - 1}] (or ignore_index = {ignore_index}), got {target[wrong][0].item()}"
        )
    return min(low, ignore_index), max(high, ignore_index)


def checked_weight(weight: Tensor | Sequence[float]) -> Tensor:
    """A copy of class weights, one finite, non-negative factor a class."""
    weight = torch.as_tensor(weight, dtype=torch.get_default_dtype()).detach().clone()
    if weight.ndim != 1 or not bool((weight.isfinite() & (weight >= 0)).all()):
        raise ValueError(f"weight must hold one finite, non-negative factor a class, got {weight.tolist()}")
    return weight
