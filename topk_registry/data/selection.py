"""Functions that change a data set: label noise, long tails, subsets, held-out parts and new class numbers.

Most functions return a :class:`Selection`: a data set that stores indices and targets, and reads the images from the
original data set. The functions also accept a :class:`Selection`, so several changes can follow each other. Random
choices depend only on the argument ``seed``.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from topk_registry.data.held_out import held_out_indices, pick
from topk_registry.data.labels import Labels, class_counts, class_names_of, labels_of, targets_of
from topk_registry.errors import UnreadableImageError

Indices = NDArray[np.int64]
LEFT_OUT = -100  # target of an unreadable image in an evaluation: losses and metrics ignore this label
MAX_MESSAGES = 10  # maximum number of messages about unreadable images per process
MAX_FAILURES = 10  # after this number of consecutive unreadable images, reading fails


class Selection:
    """A data set that consists of selected samples of another map-style data set, with the same or new targets.

    If the image of sample i cannot be read, ``selection[i]`` returns the next pair (image, target) whose image can be
    read, and prints a message to standard error. If the attribute ``substitutes`` is False, as for evaluation, the
    target of this pair is -100 instead, which losses and metrics ignore. For k-hot targets, all entries are -100. If 10
    consecutive images cannot be read, the selection raises ``UnreadableImageError``.

    Args:
        dataset: data set of pairs (image, target), or another selection.
        indices: indices of the selected samples in ``dataset``, in the new order: [M]. Default: all samples.
        targets: targets of the selected samples: class indices [M] or k-hot vectors [M, n]. Default: the targets of
            ``dataset``.
        classes: class names: [n]. Default: the class names of ``dataset``.
        notes: messages for the user that describe the changes.

    The attribute ``true_targets`` contains the targets without label noise.
    """

    def __init__(
        self,
        dataset: Any,
        indices: Indices | None = None,
        *,
        targets: NDArray[Any] | None = None,
        classes: Sequence[str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        chosen: Indices = np.arange(len(dataset)) if indices is None else np.asarray(indices, np.int64)
        self.targets = self.true_targets = targets
        if targets is None and (known := targets_of(dataset)) is not None:
            self.targets = known[chosen]
            self.true_targets = getattr(dataset, "true_targets", known)[chosen]
        self.classes = list(classes) if classes is not None else class_names_of(dataset)
        self.superclasses = None if classes is not None else getattr(dataset, "superclasses", None)
        self.notes = [*getattr(dataset, "notes", ()), *notes]
        self.substitutes: bool = getattr(dataset, "substitutes", True)
        if isinstance(dataset, Selection):
            chosen, dataset = dataset.indices[chosen], dataset.dataset
        self.dataset, self.indices = dataset, chosen
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
        first = range(len(self))[index]  # IndexError after the last sample, which ends a loop over the data set
        for place in range(first, first + min(MAX_FAILURES, len(self))):
            index = place % len(self)
            try:
                image, target = self.dataset[int(self.indices[index])]
            except UnreadableImageError as error:
                if index not in self._named and len(self._named) < MAX_MESSAGES:
                    self._named.add(index)
                    done = "used the next image" if self.substitutes else "left it out"
                    tqdm.write(f"{error}; {done}", file=sys.stderr)
                continue
            if self.targets is not None:
                target = self.targets[index]
                target = torch.from_numpy(target) if target.ndim else int(target)
            if place != first and not self.substitutes:
                target = torch.full_like(target, LEFT_OUT) if isinstance(target, torch.Tensor) else LEFT_OUT
            return image, target
        raise UnreadableImageError(f"{MAX_FAILURES} consecutive images cannot be read, up to sample {index}")


def with_label_noise(dataset: Any, share: float, *, kind: str = "", seed: int = 0) -> Selection:
    """Replace the labels of random samples, and return the data set with the new labels.

    Args:
        dataset: data set with one label per image. ``dataset.superclasses``, if any, has the group of each class.
        share: number from 0 to 1. With the kind ``"family"``, each label is replaced with this probability. With
            ``"uniform"``, exactly this fraction of the labels is replaced (up to rounding).
        kind: With ``"family"``, the new label is drawn uniformly from the classes of the same group, so the new label
            can equal the true label (Berrada et al. 2018, section 5.1). With ``"uniform"``, the new label is drawn
            uniformly from all classes except the true class. Default: ``"family"`` if groups are known.
        seed: random seed.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of label noise must be in [0, 1], got {share!r}")
    labels, counts = _labels_and_counts(dataset)
    family = getattr(dataset, "superclasses", None)
    kind = kind or ("uniform" if family is None else "family")
    if kind == "uniform":
        noisy = uniform_noise(labels, len(counts), share, seed=seed)
    elif kind == "family" and family is not None:
        noisy = family_noise(labels, family, share, seed=seed)
    else:
        raise ValueError(f"label noise must be uniform, or family if the data set has superclasses, got {kind!r}")
    note = f"label noise {share:g} ({kind}): {int((noisy != labels).sum())} of {len(labels)} training labels differ"
    changed = Selection(dataset, targets=noisy, notes=[note])
    changed.true_targets = labels
    return changed


def family_noise(labels: Labels, superclasses: Sequence[int], share: float, *, seed: int) -> Labels:
    """Replace each label with probability ``share`` by a random class of its superclass, and return all labels [N]."""
    members = [np.flatnonzero(np.asarray(superclasses) == s) for s in superclasses]
    rng = np.random.default_rng([seed, 11])
    redrawn, place = rng.random(len(labels)) < share, rng.random(len(labels))
    drawn = [members[c][int(u * len(members[c]))] for c, u in zip(labels, place, strict=True)]
    return np.where(redrawn, np.asarray(drawn, np.int64), labels)


def uniform_noise(labels: Labels, num_classes: int, share: float, *, seed: int) -> Labels:
    """Replace ``round(share * N)`` random labels, each by a random different class, and return all labels [N]."""
    rng = np.random.default_rng([seed, 17])
    wrong = rng.permutation(len(labels))[: round(share * len(labels))]
    noisy = labels.copy()
    noisy[wrong] = (labels[wrong] + rng.integers(1, num_classes, len(wrong))) % num_classes
    return noisy


def subset(dataset: Any, fraction: float, *, seed: int = 0) -> Selection:
    """Keep a random ``fraction`` of each class, and at least one sample of each class.

    If targets are k-hot, keep a random ``fraction`` of all samples instead.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"the fraction must be in (0, 1], got {fraction!r}")
    labels, counts = _labels_and_counts(dataset, k_hot=True)
    kept = pick(labels, [min(count, max(1, round(fraction * count))) for count in counts], seed=seed)
    return Selection(dataset, kept, notes=[f"subset {fraction:g}: {len(kept)} of {len(labels)} images"])


def long_tail(dataset: Any, factor: float, *, seed: int = 0) -> Selection:
    """Drop random samples so that class sizes decrease exponentially from the first class to the last.

    Class c = 0, ..., n - 1 keeps m * factor^(-c / (n - 1)) samples, where m is the size of the largest class (Cui et
    al. 2019). The number is rounded, and at least 1. If a class has fewer samples, it keeps all samples. For example,
    if four classes have 1000 samples each and ``factor`` is 1000, they keep 1000, 100, 10 and 1 samples.
    """
    labels, counts = _labels_and_counts(dataset)
    kept = pick(labels, long_tail_counts(counts, factor), seed=seed)
    sizes = class_counts(labels[kept], len(counts))
    note = f"long tail: {max(sizes)} to {min(sizes)} images per class, {len(kept)} in total"
    return Selection(dataset, kept, notes=[note])


def long_tail_counts(counts: Sequence[int], factor: float) -> list[int]:
    """Return the class sizes [n] after :func:`long_tail` of a data set with the class sizes ``counts`` [n]."""
    if not factor >= 1.0:
        raise ValueError(f"the factor of a long tail must be at least 1, got {factor!r}")
    share = factor ** -np.linspace(0.0, 1.0, len(counts))
    return np.minimum(np.maximum(1, np.rint(max(counts) * share).astype(int)), counts).tolist()


def hold_out(dataset: Any, fraction: float, *, seed: int = 0) -> tuple[Selection, Selection]:
    """Divide a data set at random into two parts, and return (rest, held-out part).

    The labels of the held-out part are the labels without label noise. Each class has at least one sample in the rest.
    Each class with at least two samples also has at least one sample in the held-out part.

    Args:
        fraction: fraction of each class to hold out. If targets are k-hot, the fraction of all samples to hold out.
        seed: random seed.
    """
    labels, counts = _labels_and_counts(dataset, k_hot=True)
    held = held_out_indices(labels, counts, fraction, seed=seed)
    rest = np.setdiff1d(np.arange(len(labels)), held)
    part = Selection(dataset, held)
    part.targets = part.true_targets
    return Selection(dataset, rest), part


def renumber(dataset: Any, numbers: Mapping[int, int], classes: Sequence[str]) -> Selection:
    """Give the classes new indices, and drop the classes that have no new index.

    If targets are class indices, the samples of dropped classes are dropped too. If targets are k-hot, all samples
    remain, without the labels of dropped classes.

    Args:
        dataset: data set with old class indices.
        numbers: dictionary from old class indices to new class indices.
        classes: class names in the order of the new indices.
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
    """Draw the N sample indices of an epoch in which all classes are equally frequent (Kang et al. 2020).

    N is the number of labels, and C is the number of different classes in ``labels``. The indices are in random order.
    Each class occurs N / C times, rounded up or down. Each sample of a class with m samples occurs N / (C m) times,
    also rounded up or down, and the mean over many epochs is N / (C m). The method is systematic sampling.
    """
    present, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = rng.permutation(len(labels))
    order = order[np.argsort(inverse[order], kind="stable")]  # by class, in random order within each class
    ends = np.cumsum(len(labels) / (len(present) * counts[inverse[order]]))
    marks = rng.random() + np.arange(len(labels))
    places = np.minimum(np.searchsorted(ends, marks, side="right"), len(labels) - 1)
    return rng.permutation(order[places])


def _labels_and_counts(dataset: Any, *, k_hot: bool = False) -> tuple[Labels, list[int]]:
    targets = targets_of(dataset)
    if k_hot and targets is not None and targets.ndim == 2:  # choose from all samples, not per class: all have label 0
        return np.zeros(len(targets), np.int64), [len(targets)]
    labels, names = labels_of(dataset), class_names_of(dataset)
    return labels, class_counts(labels, len(names) if names else int(labels.max()) + 1)
