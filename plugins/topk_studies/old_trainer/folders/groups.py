"""The group of each image, such as day or night, read from a CSV table."""

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topk_studies.old_trainer.folders.images import listed

IMAGE = ("image", "file", "filename", "file_name", "path", "image_name", "image_path", "name", "id")


class GroupTable(NamedTuple):
    """The rows of a table.

    Args:
        file: that it was read from.
        columns: of the table.
        groups: of each row.
        images: of each row, as the table names them; empty where it has no such column.
    """

    file: str
    columns: Sequence[str]
    groups: Sequence[str]
    images: Sequence[str]

    def in_order(self, count: int) -> tuple[str, ...]:
        """The groups of samples in the order of their data set; raise ValueError unless there is one for each."""
        if len(self.groups) != count:
            raise ValueError(f"{self.file}: expected a row for each of {count} samples, got {len(self.groups)}")
        return tuple(self.groups)

    def below(self, paths: Sequence[str | Path], folder: str | Path) -> tuple[str, ...]:
        """The groups of images below a folder, which the table names by their paths below it.

        Raises:
            ValueError: the table lacks an image.
        """
        known = self.by_image(lambda image: _below(Path(folder, image), folder), where=f"below {folder}")
        names = [_below(path, folder) for path in paths]
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"{self.file}: {len(missing)} of {len(names)} images have no row: {listed(missing, 3)}")
        return tuple(known[name] for name in names)

    def by_image(self, key: Callable[[str], str], *, where: str) -> dict[str, str]:
        """The group of each image, by the key of its name.

        Args:
            key: from an image as the table names it to what it is looked up by.
            where: what the names are paths of, for the message.

        Raises:
            ValueError: the table has no rows or names no images, or one of them in two groups.
        """
        if not self.groups:
            raise ValueError(f"{self.file}: expected a row for each image, got none below the line of columns")
        if not self.images:
            raise ValueError(
                f"{self.file}: expected a column image or file with paths {where}, got {listed(self.columns)}"
            )
        known: dict[str, str] = {}
        for image, group in zip(self.images, self.groups, strict=True):
            if (other := known.setdefault(key(image), group)) != group:
                raise ValueError(f"{self.file}: {image} is in two groups, {other} and {group}")
        return known


def _below(path: str | Path, folder: str | Path) -> str:
    """The path below a folder, as tables name it."""
    return Path(os.path.relpath(path, folder)).as_posix()


def numbered(groups: Sequence[str] | None, count: int) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """The names of groups in order, and the number of each sample's [N]; none and None without groups.

    Raises:
        ValueError: there is not one for each of ``count`` samples.
    """
    if groups is None:
        return (), None
    if len(groups) != count:
        raise ValueError(f"expected a group for each of {count} samples, got {len(groups)}")
    names, numbers = np.unique(np.asarray(groups, str), return_inverse=True)
    return tuple(map(str, names)), numbers.astype(np.int64)


def read_groups(file: str | Path, *, column: str = "group") -> GroupTable:
    """Read a CSV table with a header.

    Args:
        file: the table.
        column: of the groups.

    Raises:
        ValueError: it has no such column, or rows without a group.
    """
    with Path(file).open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        columns, rows = list(reader.fieldnames or ()), list(reader)
    if column not in columns:
        raise ValueError(f"{file}: expected a column {column!r}, got {listed(columns) or 'no columns'}")
    groups = [(row[column] or "").strip() for row in rows]
    if empty := [line for line, group in enumerate(groups, 2) if not group]:
        raise ValueError(f"{file}: {len(empty)} rows have no {column}, the first is line {empty[0]}")
    image = next((name for name in columns if name.lower() in IMAGE and name != column), None)
    return GroupTable(str(file), columns, groups, [] if image is None else [row[image] or "" for row in rows])
