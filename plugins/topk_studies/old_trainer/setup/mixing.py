"""timm's mixup and cutmix with labels and shares as targets, in place of distributions over all classes.

timm mixes the images, and draws the shares. It is given the numbers of the rows as labels: the distributions over rows
that it makes say how much of each row there is, and are small.
"""

from typing import Any

import torch
from timm.data import FastCollateMixup, Mixup
from torch import Tensor
from torch.utils.data import default_collate

from topk_registry.ops.targets.label_mixture import LabelMixture


class LabelMixup(Mixup):
    """``timm.data.Mixup`` whose targets are a :class:`LabelMixture`.

    Args:
        smoothing: the share of the target that is spread evenly over all classes.
        options: of ``timm.data.Mixup``.
    """

    def __init__(self, *, smoothing: float, **options: Any) -> None:
        super().__init__(**options, label_smoothing=0.0)
        self.smoothing = smoothing

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, LabelMixture]:
        self.num_classes = len(target)
        x, rows = super().__call__(x, torch.arange(len(target), device=target.device))
        return x, of_rows(rows, target, self.smoothing)


class LabelMixupCollate(FastCollateMixup):
    """``timm.data.FastCollateMixup`` whose targets are a :class:`LabelMixture`; arguments as :class:`LabelMixup`."""

    def __init__(self, *, smoothing: float, **options: Any) -> None:
        super().__init__(**options, label_smoothing=0.0)
        self.smoothing = smoothing

    def __call__(self, batch: list[tuple[Any, Any]], _: object = None) -> tuple[Tensor, LabelMixture]:
        self.num_classes = len(batch)
        x, rows = super().__call__([(image, row) for row, (image, *_) in enumerate(batch)])
        return x, of_rows(rows, default_collate([target for _, target, *_ in batch]), self.smoothing)


def of_rows(rows: Tensor, target: Tensor, smoothing: float) -> LabelMixture:
    """The mixture of labels [B] where rows [B or fewer, B] say how much of each row there is: of it and of its mirror
    image in the batch."""
    label = target.long()
    count = len(rows)  # half of the batch, where timm halves it
    return LabelMixture.mixed(label[:count], label.flip(0)[:count], rows.diagonal(), smoothing)
