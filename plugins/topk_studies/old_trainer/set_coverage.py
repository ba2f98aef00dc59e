"""Coverage and size of prediction sets, over batches and ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from topk_registry.metrics.accuracy import class_groups
from topk_registry.metrics.streaming import StreamingMetric, check_labels
from topk_studies.old_trainer.oldsets import SetCounts


class SetCoverage(StreamingMetric):
    """Coverage and sizes of prediction sets.

    Results: ``coverage`` and ``mean_size`` over samples, ``median_size``, ``singletons`` and ``empty`` (shares),
    ``macro_coverage`` and ``worst_class_coverage`` over classes with samples, ``worst_size_coverage`` over ranges of
    sizes, and, with ``class_counts``, ``many_coverage``, ``medium_coverage`` and ``few_coverage``, means over classes.

    Args:
        num_classes: n; not needed with ``class_counts``.
        class_counts: how many training samples each class has [n].
        many, few: the limits of the split, as of :class:`TopKAccuracy`.
        ignore_index: rows with this label do not count.
        device: where the sums start; they follow the sets.

    Example:
        >>> metric = SetCoverage(3)
        >>> metric.update(torch.tensor([[True, True, False], [True, False, False]]), torch.tensor([1, 2]))
        >>> metric.compute()["coverage"], metric.compute()["mean_size"]
        (0.5, 1.5)
    """

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        class_counts: Tensor | Sequence[int] | None = None,
        many: int = 100,
        few: int = 20,
        ignore_index: int = -100,
        device: torch.device | str | None = None,
    ) -> None:
        n, groups = class_groups(num_classes, class_counts, many, few)
        self.ignore_index = ignore_index
        self.groups = {name: members.numpy() for name, members in groups.items()}
        classes = torch.zeros(n, dtype=torch.int64, device=device)
        sizes = torch.zeros(n + 1, dtype=torch.int64, device=device)
        super().__init__(hits=classes, seen=classes, size_hits=sizes, size_seen=sizes)

    def update(self, sets: Tensor, target: Tensor) -> None:
        """Count a batch of sets, bool [B, n], with labels [B]."""
        if sets.dtype != torch.bool or sets.ndim != 2 or sets.shape[1] != self.sums["seen"].numel():
            raise ValueError(f"sets must be bool [B, {self.sums['seen'].numel()}], got {sets.dtype} {list(sets.shape)}")
        check_labels(sets.float(), target, self.ignore_index)
        self.follow(sets)
        kept = target != self.ignore_index
        label, inside = target[kept].long(), sets[kept]
        hit, size = inside.gather(1, label[:, None])[:, 0].long(), inside.sum(1)
        for name, index, value in (
            ("hits", label, hit),
            ("seen", label, torch.ones_like(hit)),
            ("size_hits", size, hit),
            ("size_seen", size, torch.ones_like(hit)),
        ):
            self.sums[name].index_add_(0, index, value)

    def counts(self, *, sync: bool = True) -> SetCounts:
        """The sums behind the results, as arrays; by size and by class."""
        return SetCounts(**{name: value.cpu().numpy() for name, value in self.totals(sync=sync).items()})

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return SetCounts(**{name: value.numpy() for name, value in totals.items()}).summary(self.groups)
