"""Read images, and take the neighbour of one that cannot be read, as timm does; name each where it is met."""

import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import distributed as dist
from torch.utils.data import Dataset
from tqdm import tqdm

from topk_registry.data.labels import class_names_of, kept_labels_of
from topk_registry.train.errors import DataError
from topk_studies.old_trainer.data.recipes import Indices
from topk_studies.old_trainer.folders.images import count_of, listed

MOST_NAMED = 3
MOST_TOLD = 10  # of one process, as they are met; the line of the epoch counts them all
IN_A_ROW = 10  # timm gives up there too: a folder has vanished, or holds something else
# errors of Pillow on broken files, beside those of the file system
UNREADABLE = (OSError, EOFError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError)
FAILED, TOLD = 1, 2
WIDE = ("I", "F")  # Pillow's modes of 32 bits


class WatchedImages(Dataset[Any]):
    """Images of one of timm's readers, with a count of those that cannot be read.

    Where only a part of the samples is in use, the next one of that part is read instead: the neighbour of a training
    image may be held out for evaluation.

    Args:
        reader: gives an open file and a label by index.
        mode: Pillow's mode that images are converted to.
        strict: raise a ``DataError`` instead of using the neighbour.
        target_transform: makes the k-hot target of an image of several labels from what the reader gives.
    """

    def __init__(
        self,
        reader: Any,
        *,
        mode: str = "RGB",
        strict: bool = False,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.reader, self.mode, self.strict = reader, mode, strict
        self.target_transform = target_transform
        self.transform: Any = None
        self.used: Indices | None = None  # sorted
        self.state = torch.zeros(len(reader), dtype=torch.uint8).share_memory_()  # loader workers write here too
        self._told = 0

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        failed = []
        while len(failed) < IN_A_ROW:
            try:
                image, target = self._read(index)
            except UNREADABLE as error:
                self._meet(index, error)
                failed.append(index)
                index = self._after(index)
            else:
                return image if self.transform is None else self.transform(image), target
        raise DataError(
            f"{IN_A_ROW} images in a row cannot be read, {self.filename(failed[0])} to {self.filename(failed[-1])}"
            + self._whole_classes(failed)
        )

    def picture(self, index: int) -> Image.Image | None:
        """The image itself, without its transform and without a neighbour in its place; None if it cannot be read."""
        try:
            return self._read(index)[0]
        except UNREADABLE:
            return None

    def filename(self, index: int) -> str:
        """The path of an image, or its number where it has none."""
        try:
            return str(self.reader.filename(index, absolute=True) or f"sample {index}")
        except NotImplementedError:  # a reader of a table has no files
            return f"sample {index}"

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        return self.reader.filenames(basename, absolute)

    def take(self) -> list[int]:
        """Return the samples that failed in any process since the last call, and forget them."""
        failed = self.state & FAILED
        if dist.is_available() and dist.is_initialized():
            failed = failed.to("cuda") if dist.get_backend() == "nccl" else failed
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        self.state &= TOLD
        return failed.nonzero().flatten().tolist()

    def named(self, failed: list[int]) -> str:
        """The first of these samples by path, and the classes that have no other by their number of images."""
        return listed([self.filename(index) for index in failed], MOST_NAMED) + self._whole_classes(failed)

    def _read(self, index: int) -> tuple[Image.Image, Any]:
        file, target = self.reader[index]
        with file, Image.open(file) as opened:
            check_depth(opened)
            image = opened.convert(self.mode)
        if self.target_transform is None:
            return image, -1 if target is None else target
        try:
            return image, self.target_transform(target)
        except (TypeError, ValueError) as error:  # wrong labels are no unreadable image
            raise DataError(f"the labels of {self.filename(index)}: {error}") from error

    def _meet(self, index: int, error: Exception) -> None:
        if self.strict:
            raise DataError(f"cannot read {self.filename(index)}: {error} (--strict-data)") from error
        if not self.state[index] & TOLD and self._told < MOST_TOLD:
            self._told += 1
            tqdm.write(f"cannot read {self.filename(index)}: {error}; a neighbour takes its place", file=sys.stderr)
        self.state[index] = FAILED | TOLD

    def _after(self, index: int) -> int:
        if self.used is None:
            return (index + 1) % len(self)
        return int(self.used[np.searchsorted(self.used, index, side="right") % len(self.used)])

    def _whole_classes(self, failed: list[int]) -> str:
        labels, names = None if self.target_transform else kept_labels_of(self), class_names_of(self)
        if labels is None or names is None:
            return ""
        every = np.bincount(labels if self.used is None else labels[self.used], minlength=len(names))
        lost = np.bincount(labels[failed], minlength=len(names))
        whole = [f"all {lost[c]} of class {names[c]!r}" for c in np.flatnonzero((lost == every) & (lost > 0))]
        return f", which are {listed(whole)}" if whole else ""


def check_depth(image: Image.Image) -> None:
    """Raise for values that Pillow would cut at 0 or 255, as of 16 bits: the image would be white, or nearly."""
    if image.mode in WIDE or image.mode.startswith("I;16"):
        extrema: Any = image.getextrema()
        low, high = extrema
        if low < 0 or high > 255:
            raise ValueError(
                f"its values reach from {low:g} to {high:g} (mode {image.mode}), and those outside of 0 to 255 "
                "would be cut: convert it to 8 bits first"
            )


def replace_within(dataset: Any, indices: Indices) -> None:
    """Let only samples of ``indices`` (sorted) take the place of unreadable ones."""
    if (images := _watched(dataset)) is not None:
        images.used = indices


def report_unreadable(dataset: Any, kind: str) -> str:
    """One line on the unreadable images since the last call, empty if there were none; every process must call it."""
    watched = _watched(dataset)
    indices = [] if watched is None else watched.take()
    if watched is None or not indices:
        return ""
    images = count_of(indices, f"{kind} image")
    named = watched.named(indices)
    return f"{images} could not be read, and a neighbour was used instead: {named} (--strict-data refuses)"


def _watched(dataset: Any) -> WatchedImages | None:
    """Return the watched images below wrappers such as a ``Selection``, or None where there are none."""
    while dataset is not None and not isinstance(dataset, WatchedImages):
        dataset = getattr(dataset, "dataset", None)
    return dataset
