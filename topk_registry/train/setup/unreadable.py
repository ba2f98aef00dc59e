"""Count the images that timm replaces by their neighbours because they cannot be read."""

from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.utils.data import Dataset

from topk_registry.data.recipes import Indices
from topk_registry.train.errors import DataError

MOST_NAMED = 3


class _Requests:
    """A reader that remembers the samples asked of it: timm asks for the next one after a failure.

    Where only a part of the samples is in use, the next one of that part is read instead: the neighbour of a training
    image may be held out for evaluation.
    """

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.asked: list[int] = []
        self.used: Indices | None = None  # sorted

    def __getitem__(self, index: int) -> Any:
        if self.asked and self.used is not None:
            after = np.searchsorted(self.used, self.asked[-1], side="right")
            index = int(self.used[after % len(self.used)])
        self.asked.append(index)
        return self.reader[index]

    def __len__(self) -> int:
        return len(self.reader)

    def __getattr__(self, name: str) -> Any:
        if name == "reader":  # not there yet while a copy is unpickled
            raise AttributeError(name)
        return getattr(self.reader, name)


class WatchedImages(Dataset[Any]):
    """timm's image data set, with a count of the samples that it could not read.

    Args:
        dataset: timm's ``ImageDataset``.
        strict: raise a ``DataError`` instead of using the neighbour.
    """

    def __init__(self, dataset: Any, *, strict: bool) -> None:
        self.dataset, self.strict = dataset, strict
        self.reader = dataset.reader = _Requests(dataset.reader)
        self.failed = torch.zeros(len(dataset), dtype=torch.uint8).share_memory_()  # loader workers write here too

    @property
    def transform(self) -> Any:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.reader.asked.clear()
        sample = self.dataset[index]
        for unreadable in self.reader.asked[:-1]:
            if self.strict:
                raise DataError(f"cannot read {self.filename(unreadable)} (--strict-data)")
            self.failed[unreadable] = 1
        return sample

    def filename(self, index: int) -> str:
        try:
            return str(self.dataset.filename(index))
        except NotImplementedError:  # a reader of a table has no files
            return f"sample {index}"

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        return self.dataset.filenames(basename, absolute)

    def take(self) -> list[int]:
        """Return the samples that failed in any process since the last call, and forget them."""
        failed = self.failed
        if dist.is_available() and dist.is_initialized():
            failed = failed.to("cuda") if dist.get_backend() == "nccl" else failed.clone()
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        indices = failed.nonzero().flatten().tolist()
        self.failed.zero_()
        return indices


def replace_within(dataset: Any, indices: Indices) -> None:
    """Let only samples of ``indices`` (sorted) take the place of unreadable ones."""
    if (images := _watched(dataset)) is not None:
        images.reader.used = indices


def report_unreadable(dataset: Any, kind: str) -> str:
    """One line on the unreadable images since the last call, empty if there were none; every process must call it."""
    watched = _watched(dataset)
    indices = [] if watched is None else watched.take()
    if watched is None or not indices:
        return ""
    names = ", ".join(watched.filename(index) for index in indices[:MOST_NAMED])
    more = f" and {len(indices) - MOST_NAMED} more" if len(indices) > MOST_NAMED else ""
    images = f"{len(indices)} {kind} image{'s' if len(indices) > 1 else ''}"
    return f"{images} could not be read, and a neighbour was used instead: {names}{more} (--strict-data refuses)"


def _watched(dataset: Any) -> WatchedImages | None:
    """Return the watched images below wrappers such as a ``Selection``, or None where there are none."""
    while dataset is not None and not isinstance(dataset, WatchedImages):
        dataset = getattr(dataset, "dataset", None)
    return dataset
