"""The name of each sample of a data set: the path of its file, or its number where it has none."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def sample_names(dataset: Any, root: str | Path | None = None) -> list[str]:
    """Name every sample [N], without loading any: its path relative to ``root``, or else its number from 0.

    Files are those of image folders and of tar archives. Where two samples would have one name, all have numbers.
    """
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and indices is not None:  # a selection of another data set
        names = sample_names(inner, root)
        return [names[int(i)] for i in indices]
    files = getattr(getattr(dataset, "reader", dataset), "samples", None)
    named = None if files is None else [_path(each, root) for each in files]
    if not named or None in named or len(set(named)) < len(named):
        return [str(i) for i in range(len(dataset))]
    return [str(name) for name in named]


def class_words(classes: Sequence[str] | None, n: int) -> list[str]:
    """How a file of labels calls each of ``n`` classes: by its name, or its number where names are not unique."""
    names = [*(classes or ()), *map(str, range(len(classes or ()), n))]
    counts = Counter(names)
    return [name if counts[name] == 1 else str(i) for i, name in enumerate(names)]


def _path(sample: Any, root: str | Path | None) -> str | None:
    file = sample[0] if isinstance(sample, (tuple, list)) and sample else None
    if isinstance(file, (str, Path)):
        path = os.path.abspath(file)
        if root is not None and Path(path).is_relative_to(os.path.abspath(root)):
            path = os.path.relpath(path, root)
        return Path(path).as_posix()
    return getattr(file, "name", None)  # of a member of an archive
