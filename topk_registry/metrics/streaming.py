"""Base class of metrics: sums over batches and, on request, over ranks."""

import math
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch import distributed as dist

Device = torch.device | str | None


class StreamingMetric:
    """Base of metrics that sum over a data set. ``update`` adds to ``self.sums``, and ``ratios`` divides the sums."""

    def __init__(self, **sums: Tensor) -> None:
        with torch.inference_mode(False):  # inference tensors could not be updated outside inference mode
            self.sums = {name: value.clone() for name, value in sums.items()}

    def reset(self) -> None:
        """Set all sums to 0."""
        for value in self.sums.values():
            value.zero_()

    def compute(self, *, sync: bool = True) -> dict[str, float]:
        """Return the results so far by name. A result without samples is NaN. Further updates are allowed.

        In a distributed run, sums are added over ranks, so every rank must call this method. With ``sync=False``, the
        results are the results of this rank alone.
        """
        return self.ratios({name: value.cpu() for name, value in self.totals(sync=sync).items()})

    def totals(self, *, sync: bool = True) -> dict[str, Tensor]:
        """Return a copy of the sums, added over ranks if ``sync`` is set."""
        totals = {name: value.clone() for name, value in self.sums.items()}
        if sync and dist.is_available() and dist.is_initialized():
            for value in totals.values():
                dist.all_reduce(value)
        return totals

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Return the results by name from sums on the CPU."""
        raise TypeError(f"{type(self).__name__} must define ratios(totals) -> results by name")

    def follow(self, batch: Tensor) -> None:
        narrow = batch.device.type == "mps"  # MPS has no float64
        with torch.inference_mode(False):
            for name, value in self.sums.items():
                dtype = torch.float32 if narrow and value.is_floating_point() else value.dtype
                self.sums[name] = value.to(batch.device, dtype)


def checked_labels(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the labels as int64. Raise unless scores are floating point [B, n] and labels are integers [B] below n."""
    if not (isinstance(logits, Tensor) and isinstance(target, Tensor)):  # lists, for example
        raise TypeError(f"expected tensors, got {type(logits).__name__} and {type(target).__name__}")
    if not logits.is_floating_point() or logits.ndim != 2:
        raise ValueError(f"expected floating-point scores [batch, classes], got {logits.dtype} {list(logits.shape)}")
    if target.is_floating_point() or target.dtype == torch.bool or target.shape != logits.shape[:1]:
        raise ValueError(f"expected integer labels [{len(logits)}], got {target.dtype} {list(target.shape)}")
    labels = target.long()  # in uint8, an ignore_index of -100 would become 156
    if labels.device.type == "cpu":  # on a GPU, reading values would synchronize
        wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= logits.shape[1]))]
        if len(wrong):
            raise ValueError(f"expected labels in [0, {logits.shape[1] - 1}], got {wrong[0].item()}")
    return labels


def ratio(part: Tensor, whole: Tensor) -> float:
    """Return part / whole, or NaN if whole is 0."""
    return part.item() / whole.item() if whole else math.nan


def set_sizes(k: int | Sequence[int]) -> list[int]:
    """Return one set size or several as a list."""
    sizes = list(k) if isinstance(k, Sequence) else [k]
    if not sizes or not all(isinstance(size, Integral) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(f"k must be one or several integers of at least 1, got {k!r}")
    return [int(size) for size in sizes]
