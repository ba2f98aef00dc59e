"""Wrong training labels, drawn from a seed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from topk_registry.data.labels import Labels, class_names_of, labels_of, superclasses_of
from topk_registry.data.selection import Selection

KINDS = ("family", "uniform")


def with_label_noise(
    dataset: Any, share: float, *, kind: str = "", superclasses: Sequence[int] | None = None, seed: int = 0
) -> Selection:
    """Return a data set with wrong labels.

    Args:
        dataset: of one label per image.
        share: of the samples, in [0, 1].
        kind: ``family`` draws the labels of a share anew within their superclass, the true label included (Berrada
            et al. 2018, section 5.1); ``uniform`` replaces exactly this share by other classes. By default ``family``
            if superclasses are known, else ``uniform``.
        superclasses: the superclass of each class [n], by default those of the data set.
        seed: of the draw.
    """
    labels = labels_of(dataset)
    known = superclasses if superclasses is not None else superclasses_of(dataset)
    kind = kind or ("uniform" if known is None else "family")
    if kind == "family":
        if known is None:
            raise ValueError("noise_kind=family needs superclasses_file=FILE: this data set has no superclasses")
        noisy = family_noise(labels, known, share, seed=seed)
    elif kind == "uniform":
        names = class_names_of(dataset)
        noisy = uniform_noise(labels, len(names) if names else int(labels.max()) + 1, share, seed=seed)
    else:
        raise ValueError(f"the kind of label noise must be one of {', '.join(KINDS)}, got {kind!r}")
    changed = int((noisy != labels).sum())
    note = f"label noise {share:g} ({kind}): {changed} of {len(labels)} training labels differ"
    return Selection(dataset, targets=noisy, true_targets=labels, notes=[note])


def family_noise(labels: Labels, superclasses: Sequence[int], share: float, *, seed: int) -> Labels:
    """Return labels [N], a share drawn anew uniformly within their superclass; at 1 they tell the superclass only."""
    _check(share)
    family = np.asarray(superclasses)
    members = [np.flatnonzero(family == s) for s in family]
    rng = np.random.default_rng([seed, 11])
    redrawn, place = rng.random(len(labels)) < share, rng.random(len(labels))
    drawn = [members[c][int(u * len(members[c]))] for c, u in zip(labels, place, strict=True)]
    return np.where(redrawn, np.asarray(drawn, np.int64), labels)


def uniform_noise(labels: Labels, num_classes: int, share: float, *, seed: int) -> Labels:
    """Return labels [N], exactly ``round(share * N)`` of them replaced by other classes, all equally likely."""
    _check(share)
    if num_classes < 2:
        raise ValueError(f"label noise needs at least 2 classes, got {num_classes}")
    rng = np.random.default_rng([seed, 17])
    wrong = rng.permutation(len(labels))[: round(share * len(labels))]
    noisy = labels.copy()
    noisy[wrong] = (labels[wrong] + rng.integers(1, num_classes, len(wrong))) % num_classes
    return noisy


def _check(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of label noise must be in [0, 1], got {share!r}")
