"""Selections of a data set with new labels: label noise, long tails, subsets, held-out parts, class numbers.

The functions return a :class:`Selection`, which does not copy images. A selection of a selection refers to the original
data set, so changes can be chained. All random choices depend only on a seed.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from topk_registry.data.labels import Labels, class_counts, class_names_of, labels_of, superclasses_of, targets_of

Indices = NDArray[np.int64]
MAX_MESSAGES = 10  # per process
MAX_FAILURES = 10  # consecutive unreadable images


class UnreadableImageError(OSError):
    """Raised if an image file cannot be decoded."""


class Selection:
    """Samples of a map-style data set in a new order and with new targets.

    If an image cannot be read, the next sample replaces this image, and a message goes to standard error.

    Args:
        dataset: data set of pairs (image, target), or another selection.
        indices: indices of the samples in order [M]. Default: all samples.
        targets: targets of these samples, [M] or k-hot [M, n]. Default: targets of the data set.
        true_targets: targets of these samples before label noise. Default: ``targets``.
        classes: class names. Default: class names of the data set.
        notes: messages about the changes.
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
        self.notes = [*getattr(dataset, "notes", ()), *notes]
        if isinstance(dataset, Selection):
            chosen, dataset = dataset.indices[chosen], dataset.dataset
        self.dataset, self.indices = dataset, chosen
        self.targets = known if targets is None else targets
        if true_targets is None:
            true_targets = self.targets if targets is not None or true is None else true
        self.true_targets = true_targets
        self._named: set[int] = set()

    @property
    def transform(self) -> Any:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        for place in range(index, index + min(MAX_FAILURES, len(self))):
            index = place % len(self)
            try:
                image, target = self.dataset[int(self.indices[index])]
            except UnreadableImageError as error:
                if index not in self._named and len(self._named) < MAX_MESSAGES:
                    self._named.add(index)
                    tqdm.write(f"{error}; used the next image", file=sys.stderr)
                continue
            if self.targets is not None:
                target = self.targets[index]
                target = torch.from_numpy(target) if target.ndim else int(target)
            return image, target
        raise UnreadableImageError(f"{MAX_FAILURES} consecutive images cannot be read, up to sample {index}")


def with_label_noise(
    dataset: Any, share: float, *, kind: str = "", superclasses: Sequence[int] | None = None, seed: int = 0
) -> Selection:
    """Return a data set with wrong labels.

    Args:
        dataset: data set with one label per image.
        share: share of samples whose label changes or is redrawn, in [0, 1].
        kind: ``family`` redraws the labels within their superclass, including the true label (Berrada et al. 2018,
            section 5.1). ``uniform`` replaces the labels with other classes. Default: ``family`` if superclasses are
            known, else ``uniform``.
        superclasses: superclass of each class [n]. Default: superclasses of the data set.
        seed: random seed.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of label noise must be in [0, 1], got {share!r}")
    labels, counts = _labels_and_counts(dataset)
    family = superclasses if superclasses is not None else superclasses_of(dataset)
    kind = kind or ("uniform" if family is None else "family")
    if kind == "uniform":
        noisy = uniform_noise(labels, len(counts), share, seed=seed)
    elif kind != "family":
        raise ValueError(f"the kind of label noise: family or uniform, got {kind!r}")
    elif family is None:
        raise ValueError("the kind of label noise: family needs superclasses, which are unknown")
    else:
        noisy = family_noise(labels, family, share, seed=seed)
    note = f"label noise {share:g} ({kind}): {int((noisy != labels).sum())} of {len(labels)} training labels differ"
    return Selection(dataset, targets=noisy, true_targets=labels, notes=[note])


def family_noise(labels: Labels, superclasses: Sequence[int], share: float, *, seed: int) -> Labels:
    """Return the labels [N] with a random share redrawn uniformly within the superclass, including the true label."""
    members = [np.flatnonzero(np.asarray(superclasses) == s) for s in superclasses]
    rng = np.random.default_rng([seed, 11])
    redrawn, place = rng.random(len(labels)) < share, rng.random(len(labels))
    drawn = [members[c][int(u * len(members[c]))] for c, u in zip(labels, place, strict=True)]
    return np.where(redrawn, np.asarray(drawn, np.int64), labels)


def uniform_noise(labels: Labels, num_classes: int, share: float, *, seed: int) -> Labels:
    """Return labels [N] with exactly ``round(share * N)`` of them replaced by other classes, uniformly at random."""
    rng = np.random.default_rng([seed, 17])
    wrong = rng.permutation(len(labels))[: round(share * len(labels))]
    noisy = labels.copy()
    noisy[wrong] = (labels[wrong] + rng.integers(1, num_classes, len(wrong))) % num_classes
    return noisy


def subset(dataset: Any, fraction: float, *, seed: int = 0) -> Selection:
    """Keep a random fraction of each class, at least one sample. With k-hot targets, keep a fraction of all samples."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"the fraction must be in (0, 1], got {fraction!r}")
    labels, counts = _labels_and_counts(dataset, k_hot=True)
    kept = _pick(labels, [min(count, max(1, round(fraction * count))) for count in counts], seed=seed)
    return Selection(dataset, kept, notes=[f"subset {fraction:g}: {len(kept)} of {len(labels)} images"])


def long_tail(dataset: Any, factor: float, *, seed: int = 0) -> Selection:
    """Drop samples so that class frequencies fall exponentially, by ``factor`` from the first to the last class.

    Class c keeps a share of factor^(-c / (n - 1)) (Cui et al. 2019).
    """
    labels, counts = _labels_and_counts(dataset)
    kept = _pick(labels, long_tail_counts(counts, factor), seed=seed)
    sizes = class_counts(labels[kept], len(counts))
    note = f"long tail: {max(sizes)} to {min(sizes)} images per class, {len(kept)} in total"
    return Selection(dataset, kept, notes=[note])


def long_tail_counts(counts: Sequence[int], factor: float) -> list[int]:
    """Return the number of samples to keep per class [n], at least 1 and at most the available number."""
    if not factor >= 1.0:
        raise ValueError(f"the factor of a long tail must be at least 1, got {factor!r}")
    share = factor ** -np.linspace(0.0, 1.0, len(counts))
    return np.minimum(np.maximum(1, np.rint(max(counts) * share).astype(int)), counts).tolist()


def hold_out(dataset: Any, fraction: float, *, seed: int = 0) -> tuple[Selection, Selection]:
    """Split a data set and return (rest, held-out part). The held-out part has the labels without label noise.

    Args:
        dataset: data set to split. The rest keeps at least one sample per class.
        fraction: fraction of each class that is held out. For k-hot targets, the fraction is of all samples.
        seed: random seed.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the held-out fraction must be in (0, 1), got {fraction!r}")
    labels, counts = _labels_and_counts(dataset, k_hot=True)
    sizes = [max(0, min(max(1, round(fraction * count)), count - 1)) for count in counts]
    held = _pick(labels, sizes, seed=seed)
    rest = np.setdiff1d(np.arange(len(labels)), held)
    true = getattr(dataset, "true_targets", None)
    return Selection(dataset, rest), Selection(dataset, held, targets=None if true is None else true[held])


def renumber(dataset: Any, numbers: Mapping[int, int], classes: Sequence[str]) -> Selection:
    """Assign new class numbers. Samples and labels of classes without a new number are dropped.

    Args:
        dataset: data set to renumber.
        numbers: new number by old class number.
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
    """Draw sample indices [N] for an epoch with equally frequent classes, in random order (Kang et al. 2020).

    The method is systematic sampling. A sample occurs N / (classes * samples of its class) times on average. The actual
    number is this number rounded up or down. The number of samples per class is rounded likewise.
    """
    present, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = rng.permutation(len(labels))
    order = order[np.argsort(inverse[order], kind="stable")]  # by class, in random order within each class
    ends = np.cumsum(len(labels) / (len(present) * counts[inverse[order]]))
    marks = rng.random() + np.arange(len(labels))
    places = np.minimum(np.searchsorted(ends, marks, side="right"), len(labels) - 1)
    return rng.permutation(order[places])


def _labels_and_counts(dataset: Any, *, k_hot: bool = False) -> tuple[Labels, list[int]]:
    """Return the label of each sample and the class sizes. With ``k_hot``, all k-hot targets count as one class."""
    targets = targets_of(dataset)
    if k_hot and targets is not None and targets.ndim == 2:
        return np.zeros(len(targets), np.int64), [len(targets)]
    labels, names = labels_of(dataset), class_names_of(dataset)
    return labels, class_counts(labels, len(names) if names else int(labels.max()) + 1)


def _pick(labels: Labels, counts: Sequence[int], *, seed: int) -> Indices:
    """Draw ``counts[c]`` samples of each class c as sorted indices. Larger counts keep the samples of smaller ones."""
    order = np.random.default_rng([seed, 13]).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    starts = np.searchsorted(labels[order], np.arange(len(counts)))
    return np.sort(np.concatenate([order[start : start + count] for start, count in zip(starts, counts, strict=True)]))
