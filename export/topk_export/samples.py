"""Held-out images of a folder with their labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from topk_export.errors import ImageError
from topk_export.runtime.preprocess import SUFFIXES


class Samples(NamedTuple):
    """Images that :meth:`Predictor.preprocess` takes, and the label of each."""

    name: str
    images: Any  # a sequence, which may read an image only when it is asked for
    labels: np.ndarray


def open_folder(folder: str | Path, class_names: Sequence[str]) -> Samples:
    """The images of ``FOLDER/CLASS/...``, each class a folder named as in the file, or as many folders as classes.

    Folders whose names are not the file's classes are taken in the order of their names, as a training run takes them.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ImageError(f"the folder {root} does not exist")
    found = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    known = {name: i for i, name in enumerate(class_names)}
    if found and all(path.name in known for path in found):
        numbers = [known[path.name] for path in found]
    elif len(found) == len(class_names):
        numbers = list(range(len(found)))
    else:
        strange = [path.name for path in found if path.name not in known]
        example = f" ({strange[0]!r} is none of the file's)" if strange else ""
        raise ValueError(
            f"{root} has {len(found)} class folders{example}; expected one for each of its {len(class_names)} classes, "
            f"or folders with their names: {', '.join(class_names[:3])}, ..."
        )
    images, labels = [], []
    for path, number in zip(found, numbers, strict=True):
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        images += inside
        labels += [number] * len(inside)
    if not images:
        raise ImageError(f"{root} holds no images ({', '.join(sorted(SUFFIXES))})")
    return Samples(str(root), images, np.asarray(labels, np.int64))
