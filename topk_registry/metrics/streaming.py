"""Base class and shared functions of the metrics. A metric stores sums, which are added over batches and ranks."""

import math
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch import distributed as dist

Device = torch.device | str | None


class StreamingMetric:
    """Base class of metrics that are computed from sums over all samples.

    A subclass defines two methods. ``update`` adds a batch to the tensors in ``self.sums``. :meth:`ratios` computes the
    results from the sums.

    Args:
        sums: initial value of each sum, by name: float64.
    """

    def __init__(self, **sums: Tensor) -> None:
        with torch.inference_mode(False):  # a tensor from inference mode cannot be updated outside
            self.sums = {name: value.clone() for name, value in sums.items()}

    def reset(self) -> None:
        for value in self.sums.values():
            value.zero_()

    def compute(self, *, sync: bool = True) -> dict[str, float]:
        """Return the results for all samples so far, by name. If there were no samples, the results are NaN.

        In a distributed run, the results are for the samples of all ranks, so every rank must call this method. With
        ``sync=False``, the results are for the samples of this rank only. Further updates are possible.
        """
        totals = {name: value.clone() for name, value in self.sums.items()}
        if sync and dist.is_available() and dist.is_initialized():
            for value in totals.values():
                dist.all_reduce(value)
        return self.ratios({name: value.cpu() for name, value in totals.items()})

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Compute results by name from the sums ``totals``, which are on the CPU. Subclasses define this method."""
        raise TypeError(f"{type(self).__name__} must define ratios(totals) -> results by name")

    def follow(self, batch: Tensor) -> None:
        dtype = torch.float32 if batch.device.type == "mps" else torch.float64  # MPS has no float64
        with torch.inference_mode(False):
            self.sums = {name: value.to(batch.device, dtype) for name, value in self.sums.items()}


def checked_labels(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the labels as int64 [B]. Raise ValueError if logits [B, n] or labels are invalid.

    A valid label is an integer from 0 to n - 1, or ``ignore_index``. Values of labels on a GPU are not checked.
    """
    if not logits.is_floating_point() or logits.ndim != 2:
        raise ValueError(f"expected floating-point logits [batch, classes], got {logits.dtype} {list(logits.shape)}")
    if target.is_floating_point() or target.dtype == torch.bool or target.shape != logits.shape[:1]:
        raise ValueError(f"expected integer labels [{len(logits)}], got {target.dtype} {list(target.shape)}")
    labels = target.long()  # a uint8 tensor would convert an ignore_index of -100 into 156
    if labels.device.type == "cpu":  # reading values from a GPU would wait for the GPU
        wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= logits.shape[1]))]
        if len(wrong):
            raise ValueError(f"expected labels in [0, {logits.shape[1] - 1}], got {wrong[0].item()}")
    return labels


def ratio(part: Tensor, whole: Tensor) -> float:
    return part.item() / whole.item() if whole else math.nan


def set_sizes(k: int | Sequence[int]) -> list[int]:
    """Return the argument ``k`` of a metric as a list of positive integers, or raise ValueError."""
    sizes = list(k) if isinstance(k, Sequence) else [k]
    if not sizes or not all(isinstance(size, Integral) and size > 0 for size in sizes):
        raise ValueError(f"k must be one or several integers of at least 1, got {k!r}")
    return [int(size) for size in sizes]
