"""Harder versions of a data set: label noise, long tails, small balanced subsets, and a held-out part.

Every recipe works on the array of labels and returns indices or new labels; :class:`Selection` applies them to a data
set without copying it. All are drawn from a seed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topk_registry.data.labels import KHot, Labels, kept_k_hot_of

Indices = NDArray[np.int64]
PARETO_ALPHA = 6.0


class Part:
    """Samples of a data set by index, as it has them.

    Args:
        dataset: a map-style data set of (image, target).
        indices: which samples, in order [M].
        classes: the names of the classes, where they have other numbers than those of the data set.
    """

    def __init__(self, dataset: Any, indices: Indices, classes: Sequence[str] | None = None) -> None:
        self.dataset = dataset
        self.indices = indices
        if classes is not None:
            self.classes = list(classes)
            return
        for name in ("classes", "superclasses"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    @property
    def transform(self) -> Any:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.dataset[int(self.indices[index])]


class Selection(Part):
    """Samples of a data set by index, with other labels where ``noisy`` says so.

    Args:
        dataset: a map-style data set of (image, label).
        indices: which samples, in order [M].
        labels: the data set's own labels [N].
        noisy: the labels to train on [N], by default the data set's own.
    """

    def __init__(self, dataset: Any, indices: Indices, labels: Labels, noisy: Labels | None = None) -> None:
        super().__init__(dataset, indices)
        self._true = labels[indices]
        self.targets = self._true if noisy is None else noisy[indices]

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = super().__getitem__(index)
        # timm's readers put the next sample in the place of an unreadable one: then the label is that sample's
        return (image, int(self.targets[index])) if label == self._true[index] else (image, label)


class SelectedSets(Part):
    """Samples of a data set of several labels.

    Args:
        dataset: a map-style data set of (image, k-hot target).
        indices: which samples, in order [M].
        targets: the data set's targets [N, n]; those of the samples are kept.
    """

    def __init__(self, dataset: Any, indices: Indices, targets: KHot) -> None:
        super().__init__(dataset, indices)
        self.targets = targets[indices]


class RenumberedSets(Part):
    """All samples of a data set of several labels, under other class numbers.

    Args:
        dataset: a map-style data set of (image, k-hot target).
        numbers: the new number of each of its classes; labels of classes that have none are left out.
        classes: the names of the classes under their new numbers.
    """

    def __init__(self, dataset: Any, numbers: Mapping[int, int], classes: Sequence[str]) -> None:
        super().__init__(dataset, np.arange(len(dataset)), classes)
        self.numbers = numbers
        kept = kept_k_hot_of(dataset)
        if kept is not None:
            self.targets = self._renumbered(torch.from_numpy(kept)).numpy()

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        image, target = super().__getitem__(index)
        return image, self._renumbered(torch.as_tensor(target))

    def _renumbered(self, target: Tensor) -> Tensor:
        renumbered = target.new_zeros((*target.shape[:-1], len(self.classes)))
        renumbered[..., list(self.numbers.values())] = target[..., list(self.numbers)]
        return renumbered


class Renumbered(Part):
    """Samples of a data set under other class numbers.

    Args:
        dataset: a map-style data set of (image, label).
        labels: the data set's own labels [N].
        numbers: the new number of each of its classes; samples of classes that have none are left out.
        classes: the names of the classes under their new numbers.
    """

    def __init__(self, dataset: Any, labels: Labels, numbers: Mapping[int, int], classes: Sequence[str]) -> None:
        super().__init__(dataset, np.flatnonzero(np.isin(labels, list(numbers))), classes)
        self.numbers = numbers
        self.targets = np.asarray([numbers[label] for label in labels[self.indices].tolist()], np.int64)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = super().__getitem__(index)
        return image, self.numbers[int(label)]


def noisy_labels(labels: Labels, superclasses: Sequence[int], p: float, *, seed: int) -> Labels:
    """Return labels [N], a share ``p`` drawn anew uniformly within their superclass (Berrada et al. 2018, 5.1).

    At ``p = 1`` a label tells the superclass and nothing more. The label itself is among those drawn.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"label noise must be in [0, 1], got {p!r}")
    family = np.asarray(superclasses)
    members = [np.flatnonzero(family == s) for s in family]
    rng = np.random.default_rng([seed, 11])
    redrawn = rng.random(len(labels)) < p
    place = rng.random(len(labels))
    drawn = [members[c][int(u * len(members[c]))] for c, u in zip(labels, place, strict=True)]
    return np.where(redrawn, np.asarray(drawn, np.int64), labels)


def long_tail_counts(counts: Sequence[int], profile: str, factor: float) -> list[int]:
    """Number of samples to keep of each class [n], from all of class 0 down to a ``factor``-th of it for the last.

    With u = c / (n - 1): ``exp`` keeps factor^-u (Cui et al. 2019), ``pareto`` keeps
    (1 + u (factor^(1/alpha) - 1))^-alpha with alpha = 6 (Liu et al. 2019). Never more than there are, and at least one.
    """
    if not factor >= 1.0:
        raise ValueError(f"the imbalance factor must be at least 1, got {factor!r}")
    u = np.linspace(0.0, 1.0, len(counts))
    if profile == "exp":
        share = factor**-u
    elif profile == "pareto":
        share = (1 + u * (factor ** (1 / PARETO_ALPHA) - 1)) ** -PARETO_ALPHA
    else:
        raise ValueError(f"the long tail must be 'pareto' or 'exp', got {profile!r}")
    kept = np.maximum(1, np.rint(max(counts) * share).astype(int))
    return np.minimum(kept, counts).tolist()


def fraction_counts(counts: Sequence[int], fraction: float) -> list[int]:
    """Number of samples to keep of each class [n]: the fraction, rounded, and at least one of a class that has any."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"the fraction must be in (0, 1], got {fraction!r}")
    return [min(count, max(1, round(fraction * count))) for count in counts]


def pick(labels: Labels, counts: Sequence[int], *, seed: int, part: int = 0) -> Indices:
    """``counts[c]`` random samples of each class c, as sorted indices; more samples extend fewer.

    The parts 0, 1, ... of one seed are apart for as long as a class has samples left, then they begin again.
    """
    rng = np.random.default_rng([seed, 13])
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # by class, in random order within each
    ends = np.searchsorted(labels[order], np.arange(len(counts) + 1))
    places = [
        first + np.arange(part * count, (part + 1) * count) % max(1, last - first)
        for first, last, count in zip(ends, ends[1:], counts, strict=False)
    ]
    return np.sort(order[np.concatenate(places)])


def hold_out(
    labels: Labels, counts: Sequence[int], fraction: float, *, seed: int, fold: int = 0
) -> tuple[Indices, Indices]:
    """Split into (rest, held out): the same ``fraction`` of each class is held out, and another part in each fold.

    At least one sample of each class stays in the rest.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the held-out fraction must be in (0, 1), got {fraction!r}")
    wanted = [min(kept, count - 1) for kept, count in zip(fraction_counts(counts, fraction), counts, strict=True)]
    held = pick(labels, [max(0, count) for count in wanted], seed=seed, part=fold)
    rest = np.setdiff1d(np.arange(len(labels)), held)
    return rest, held


def hold_out_any(size: int, fraction: float, *, seed: int, fold: int = 0) -> tuple[Indices, Indices]:
    """Split ``size`` samples at random into (rest, held out), and into other parts in each fold."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the held-out fraction must be in (0, 1), got {fraction!r}")
    count = min(size - 1, max(1, round(fraction * size)))
    order = np.random.default_rng([seed, 17]).permutation(size)
    held = np.sort(order[np.arange(fold * count, (fold + 1) * count) % size])
    return np.setdiff1d(np.arange(size), held), held
