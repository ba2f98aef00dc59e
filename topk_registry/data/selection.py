"""Samples of a data set with labels of their own: subsets, long tails, held-out parts, other class numbers.

A change of a data set returns a :class:`Selection`, which copies no image. A selection of a selection refers to the
data set itself, so that changes can follow each other. All random choices depend on a seed alone.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed as dist
from tqdm import tqdm

from topk_registry.data.labels import Labels, class_counts, class_names_of, kept_k_hot_of, labels_of, superclasses_of

Indices = NDArray[np.int64]
PARETO_ALPHA = 6.0
MAX_MESSAGES = 10  # per process
MAX_FAILURES = 10  # unreadable images in a row
UNREAD, REPORTED = 1, 2


class UnreadableImageError(OSError):
    """An image file cannot be decoded."""


class Selection:
    """Samples of a map-style data set, in an order and with targets of their own.

    The next sample of the selection replaces an unreadable image; the first ones are named on standard error, and
    :meth:`unreadable` counts them.

    Args:
        dataset: of pairs (image, target), or another selection.
        indices: which samples, in order [M]; all by default.
        targets: their targets, [M] or k-hot [M, n]; those of the data set by default.
        true_targets: their targets before label noise, by default ``targets``.
        classes: class names, by default those of the data set.
        notes: sentences about what was changed.
    """

    def __init__(
        self,
        dataset: Any,
        indices: Indices | None = None,
        *,
        targets: NDArray[Any] | None = None,
        true_targets: NDArray[Any] | None = None,
        classes: Sequence[str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        chosen: Indices = np.arange(len(dataset)) if indices is None else np.asarray(indices, np.int64)
        known, true = targets_of(dataset), getattr(dataset, "true_targets", None)
        known, true = (None if each is None else each[chosen] for each in (known, true))
        self.classes = list(classes) if classes is not None else class_names_of(dataset)
        self.superclasses = None if classes is not None else superclasses_of(dataset)
        self.strict = getattr(dataset, "strict", False)
        self.notes = [*getattr(dataset, "notes", ()), *notes]
        if isinstance(dataset, Selection):
            chosen, dataset = dataset.indices[chosen], dataset.dataset
        self.dataset, self.indices = dataset, chosen
        self.targets = known if targets is None else targets
        if true_targets is None:
            true_targets = self.targets if targets is not None or true is None else true
        self.true_targets = true_targets
        self._state = torch.zeros(len(chosen), dtype=torch.uint8).share_memory_()  # written by worker processes
        self._messages = 0

    @property
    def transform(self) -> Any:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        for _ in range(min(MAX_FAILURES, len(self))):
            try:
                image, target = self.dataset[int(self.indices[index])]
            except UnreadableImageError as error:
                if self.strict:
                    raise
                self._report(index, error)
                index = (index + 1) % len(self)
            else:
                return image, target if self.targets is None else self._target(index)
        raise UnreadableImageError(f"{MAX_FAILURES} images in a row cannot be read, up to {self.filename(index)}")

    def _target(self, index: int) -> Any:
        target = self.targets[index]  # pyright: ignore[reportOptionalSubscript]
        return torch.from_numpy(target) if target.ndim else int(target)

    def _report(self, index: int, error: Exception) -> None:
        if not self._state[index] & REPORTED and self._messages < MAX_MESSAGES:
            self._messages += 1
            tqdm.write(f"{error}; used the next image", file=sys.stderr)
        self._state[index] = UNREAD | REPORTED

    def filename(self, index: int) -> str:
        """Return the path of an image, or its number if it has none."""
        name = getattr(self.dataset, "filename", None)
        return str(name(int(self.indices[index]))) if callable(name) else f"sample {self.indices[index]}"

    def unreadable(self) -> list[str]:
        """Return the images that could not be read in any process since the last call; all ranks must call it."""
        failed = self._state & UNREAD
        if dist.is_available() and dist.is_initialized():
            failed = failed.to("cuda") if dist.get_backend() == "nccl" else failed
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        self._state &= REPORTED
        return [self.filename(index) for index in failed.nonzero().flatten().tolist()]


def targets_of(dataset: Any) -> NDArray[Any] | None:
    """Return the targets of all samples, [N] or k-hot [N, n], if the data set stores them apart from its images."""
    kept = getattr(dataset, "targets", None)
    if kept is not None and not callable(kept):
        return np.asarray(kept, np.float32 if len(kept) and np.ndim(kept[0]) else np.int64)
    if getattr(dataset, "target_transform", None) is not None and hasattr(dataset, "reader"):
        return kept_k_hot_of(dataset)
    reader = getattr(dataset, "reader", None)
    return labels_of(dataset) if hasattr(reader, "samples") or hasattr(reader, "iter_targets") else None


def subset(dataset: Any, fraction: float, *, seed: int = 0) -> Selection:
    """Keep a random fraction of each class, and at least one sample of each; of k-hot targets, of all samples."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"the fraction must be in (0, 1], got {fraction!r}")
    labels, counts = _labels_and_counts(dataset)
    kept = _pick(labels, [min(count, max(1, round(fraction * count))) for count in counts], seed=seed)
    return Selection(dataset, kept, notes=[f"subset {fraction:g}: {len(kept)} of {len(labels)} images"])


def long_tail(dataset: Any, factor: float, *, profile: str = "exp", seed: int = 0) -> Selection:
    """Thin out a data set so that class 0 keeps its images and the last class a ``factor``-th of that number.

    Args:
        dataset: of one label per image.
        factor: how many times the first class is as frequent as the last.
        profile: with u = c / (n - 1), ``exp`` keeps factor^-u (Cui et al. 2019), ``pareto`` keeps
            (1 + u (factor^(1/6) - 1))^-6 (Liu et al. 2019).
        seed: of the images that are kept.
    """
    labels, counts = _labels_and_counts(dataset, k_hot=False)
    kept = _pick(labels, long_tail_counts(counts, factor, profile), seed=seed)
    sizes = class_counts(labels[kept], len(counts))
    note = f"long tail ({profile}): {max(sizes)} to {min(sizes)} images per class, {len(kept)} in total"
    return Selection(dataset, kept, notes=[note])


def long_tail_counts(counts: Sequence[int], factor: float, profile: str = "exp") -> list[int]:
    """Return the number of samples to keep of each class [n]; at least one, and never more than there are."""
    if not factor >= 1.0:
        raise ValueError(f"the factor of a long tail must be at least 1, got {factor!r}")
    u = np.linspace(0.0, 1.0, len(counts))
    if profile == "exp":
        share = factor**-u
    elif profile == "pareto":
        share = (1 + u * (factor ** (1 / PARETO_ALPHA) - 1)) ** -PARETO_ALPHA
    else:
        raise ValueError(f"the profile of a long tail must be 'exp' or 'pareto', got {profile!r}")
    return np.minimum(np.maximum(1, np.rint(max(counts) * share).astype(int)), counts).tolist()


def hold_out(
    dataset: Any, fraction: float, *, fold: int = 0, seed: int = 0, twin: Any = None
) -> tuple[Selection, Selection]:
    """Split into (rest, held out). The held-out part has the labels from before label noise.

    Args:
        dataset: to split. At least one sample of each class stays in the rest.
        fraction: of each class that is held out; of k-hot targets, of all samples.
        fold: each fold holds out another part.
        seed: of the split.
        twin: a second copy of the data set for the held-out part, which then has a transform of its own.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the held-out fraction must be in (0, 1), got {fraction!r}")
    labels, counts = _labels_and_counts(dataset)
    sizes = [max(0, min(max(1, round(fraction * count)), count - 1)) for count in counts]
    held = _pick(labels, sizes, seed=seed, part=fold)
    rest = np.setdiff1d(np.arange(len(labels)), held)
    source = dataset if twin is None else twin
    true = getattr(source, "true_targets", None)
    note = f"held out {len(held)} training images, {fraction:g} of each class, for evaluation"
    return (
        Selection(dataset, rest, notes=[note]),
        Selection(source, held, targets=None if true is None else true[held]),
    )


def renumber(dataset: Any, numbers: Mapping[int, int], classes: Sequence[str]) -> Selection:
    """Give a data set other class numbers; samples and labels of classes without a new number are dropped.

    Args:
        dataset: to renumber.
        numbers: the new number of each old class number.
        classes: class names in the new order.
    """
    targets = targets_of(dataset)
    if targets is not None and targets.ndim == 2:
        moved = np.zeros((len(targets), len(classes)), np.float32)
        moved[:, list(numbers.values())] = targets[:, list(numbers)]
        return Selection(dataset, targets=moved, classes=classes)
    labels = labels_of(dataset)
    kept = np.flatnonzero(np.isin(labels, list(numbers)))
    moved = np.asarray([numbers[label] for label in labels[kept].tolist()], np.int64)
    return Selection(dataset, kept, targets=moved, classes=classes)


def class_balanced_epoch(labels: Labels, rng: np.random.Generator) -> Indices:
    """Draw the indices of an epoch in which all classes are equally frequent [N], in random order (Kang et al. 2020).

    Systematic sampling: each sample occurs its expected number of times, N / (classes * samples of its class), rounded
    up or down, and so does each class.
    """
    present, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = rng.permutation(len(labels))
    order = order[np.argsort(inverse[order], kind="stable")]  # by class, in random order within each
    ends = np.cumsum(len(labels) / (len(present) * counts[inverse[order]]))
    marks = rng.random() + np.arange(len(labels))
    places = np.minimum(np.searchsorted(ends, marks, side="right"), len(labels) - 1)
    return rng.permutation(order[places])


def _labels_and_counts(dataset: Any, *, k_hot: bool = True) -> tuple[Labels, list[int]]:
    """The label of each sample and the class sizes; k-hot targets are taken as one class."""
    targets = targets_of(dataset)
    if targets is not None and targets.ndim == 2 and k_hot:
        return np.zeros(len(targets), np.int64), [len(targets)]
    labels = labels_of(dataset)
    names = class_names_of(dataset)
    return labels, class_counts(labels, len(names) if names else int(labels.max()) + 1)


def _pick(labels: Labels, counts: Sequence[int], *, seed: int, part: int = 0) -> Indices:
    """Draw ``counts[c]`` samples of each class, as sorted indices; larger counts extend smaller ones.

    Parts 0, 1, ... of one seed are disjoint as long as a class has samples left, then they start again.
    """
    rng = np.random.default_rng([seed, 13])
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    ends = np.searchsorted(labels[order], np.arange(len(counts) + 1))
    places = [
        first + np.arange(part * count, (part + 1) * count) % max(1, last - first)
        for first, last, count in zip(ends, ends[1:], counts, strict=False)
    ]
    return np.sort(order[np.concatenate(places)])
