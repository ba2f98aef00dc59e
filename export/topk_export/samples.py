"""Held-out images with their labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from topk_export.errors import ImageError
from topk_export.runtime.preprocess import SUFFIXES
from topk_registry.folders.classes import class_map
from topk_registry.folders.errors import FolderError
from topk_registry.folders.images import listed, read_folders


class Samples(NamedTuple):
    """Images that :meth:`Predictor.preprocess` takes, the label of each, and how folders became classes.

    ``labels`` are class indices [N]; of several labels an image, targets of 0 and 1 [N, n].
    """

    name: str
    images: Any  # a sequence, which may read an image only when it is asked for
    labels: np.ndarray
    told: str = ""
    groups: tuple[str, ...] | None = None  # of each image, for thresholds by group

    @property
    def line(self) -> str:
        """Describe them in one line of text."""
        return f"{len(self.labels)} images of {self.name}" + (f": {self.told}" if self.told else "")


def open_folder(folder: str | Path, class_names: Sequence[str], *, ignore_unknown: bool = False) -> Samples:
    """Find the images of ``FOLDER/CLASS/...`` and their classes.

    Folders stand for the classes of their names, or for all classes in natural order where no name is the same.

    Args:
        folder: holds a folder a class.
        class_names: of the file.
        ignore_unknown: leave out folders with the name of no class.

    Raises:
        ImageError: there is no such folder.
        FolderError: the folders cannot be told; the message names them.
    """
    if not Path(folder).is_dir():
        raise ImageError(f"the folder {folder} does not exist")
    folders = read_folders(folder, SUFFIXES)
    empty = f"; class folders without images: {listed(folders.empty)}" if folders.empty else ""
    try:
        mapping = class_map(folders.names, class_names, where=folder, of="the file", ignore_unknown=ignore_unknown)
    except FolderError as error:
        raise FolderError(f"{error}{empty}") from error
    chosen = [(path, mapping.numbers[name]) for path, name in folders.images if name in mapping.numbers]
    labels = np.asarray([number for _, number in chosen], np.int64)
    return Samples(str(folder), [path for path, _ in chosen], labels, mapping.told + empty)
