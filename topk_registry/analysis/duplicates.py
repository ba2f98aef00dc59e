"""Images that a data set holds twice: the same pixels, or nearly the same picture.

A picture's hash compares neighbours on a small grey copy of the image (dHash): 64 bits for neighbours in a row and 64
for neighbours in a column. Resizing, recompression and a change of brightness leave most bits as they are. Pictures of
one plain colour all have the same hash, so that near duplicates are candidates for a person to look at.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 8
DISTANCE = 4  # bits of 128 that near duplicates may differ in
COMPARED = 1 << 24  # pairs that are compared at a time, 64 MiB


@dataclass(frozen=True)
class DuplicateGroup:
    """Images that look alike.

    Args:
        members: their numbers, rising.
        exact: whether all have the same pixels.
        labels_differ: whether they have two labels or more.
    """

    members: tuple[int, ...]
    exact: bool
    labels_differ: bool


def picture_hash(image: Image.Image) -> NDArray[np.uint8]:
    """The hash of a picture, 16 bytes: one bit for each pair of neighbours in a small grey copy.

    Example:
        >>> dark, light = (Image.linear_gradient("L").point(lambda v: v // 2 + add) for add in (0, 100))
        >>> bool((picture_hash(dark) == picture_hash(light)).all())
        True
    """
    grey = image.convert("L")
    wide = np.asarray(grey.resize((SIDE + 1, SIDE), Image.Resampling.BOX), np.int16)
    tall = np.asarray(grey.resize((SIDE, SIDE + 1), Image.Resampling.BOX), np.int16)
    bits = np.concatenate([(wide[:, 1:] > wide[:, :-1]).ravel(), (tall[1:] > tall[:-1]).ravel()])
    return np.packbits(bits)


def duplicate_groups(
    contents: Sequence[bytes], hashes: NDArray[np.uint8], labels: NDArray[np.int64], *, distance: int = DISTANCE
) -> list[DuplicateGroup]:
    """Group images that look alike, groups with differing labels first, then by their first image.

    Images are joined in chains: the first and the last of a group may differ by more than ``distance``.

    Args:
        contents: a digest of the pixels of each image [N]; equal ones are exact duplicates.
        hashes: of :func:`picture_hash` [N, 16].
        labels: class indices [N].
        distance: the most bits that the hashes of near duplicates differ in; 0 for equal hashes.
    """
    if not len(contents) == len(hashes) == len(labels):
        raise ValueError(f"expected as many contents, hashes and labels, got {len(contents)}, {len(hashes)}, "
                         f"{len(labels)}")  # fmt: skip
    if not 0 <= distance < 8 * SIDE:
        raise ValueError(f"distance must be in [0, {8 * SIDE - 1}], got {distance}")
    if not len(labels):
        return []
    unique, of_image = np.unique(np.ascontiguousarray(hashes), axis=0, return_inverse=True)
    parent = _joined(unique, distance)
    group_of = parent[of_image.ravel()]
    order = np.argsort(group_of, kind="stable")
    starts = np.flatnonzero(np.diff(group_of[order])) + 1
    groups = []
    for members in np.split(order, starts):
        if len(members) > 1:
            exact = len({contents[i] for i in members}) == 1
            differ = len(np.unique(labels[members])) > 1
            groups.append(DuplicateGroup(tuple(members.tolist()), exact, differ))
    return sorted(groups, key=lambda group: (not group.labels_differ, group.members))


def _joined(hashes: NDArray[np.uint8], distance: int) -> NDArray[np.int64]:
    """The group of each of these hashes, which differ from one another.

    Two hashes that differ in at most d bits agree in one of d + 1 parts, so that only those that share a part are
    compared.
    """
    parent = np.arange(len(hashes))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    bits = np.unpackbits(hashes, axis=1)
    for part in np.array_split(np.arange(bits.shape[1]), distance + 1) if distance else []:
        _, bucket = np.unique(np.packbits(bits[:, part], axis=1), axis=0, return_inverse=True)
        order = np.argsort(bucket.ravel(), kind="stable")
        starts = np.flatnonzero(np.diff(bucket.ravel()[order])) + 1
        for members in np.split(order, starts):
            for i, j in _near(bits[members].astype(np.float32), distance) if len(members) > 1 else ():
                parent[root(int(members[j]))] = root(int(members[i]))
    return np.asarray([root(i) for i in range(len(hashes))])


def _near(bits: NDArray[np.float32], distance: int) -> Iterator[tuple[int, int]]:
    """Pairs of rows that differ in at most ``distance`` bits."""
    ones = bits.sum(axis=1)
    step = max(1, COMPARED // len(bits))
    for start in range(0, len(bits), step):
        mine = slice(start, start + step)
        different = ones[mine, None] + ones - 2 * bits[mine] @ bits.T
        for i, j in zip(*np.nonzero(different <= distance + 0.5), strict=True):
            if start + i < j:
                yield start + int(i), int(j)
