"""Held-out images with one label or several, from any data set that ``timm train`` reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.samples import Samples
from topk_registry.folders.groups import read_groups


def with_groups(samples: Samples, file: str | Path, *, column: str = "group", folder: str | Path | None) -> Samples:
    """The samples with the group of each, from a table.

    Args:
        samples: held-out images.
        file: CSV with a header.
        column: of the groups.
        folder: that images lie in, where they are files: the table names them in its column ``image`` or ``file``, as
            paths below the folder. None: the table has a row for each sample, in the order of the data set.

    Raises:
        ValueError: the table does not say the group of a sample.
    """
    table = read_groups(file, column=column)
    if folder is None:
        return samples._replace(groups=table.in_order(len(samples.labels)))
    return samples._replace(groups=table.below(samples.images, folder))


class _Images:
    """The images of a data set of pairs, read when asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index][0]


def open_dataset(
    name: str,
    class_names: Sequence[str],
    *,
    folder: str | None,
    split: str,
    options: dict[str, Any],
    download: bool,
    ignore_unknown: bool = False,
) -> Samples:
    """A data set by the name that ``timm train --dataset`` takes, its images untransformed.

    Its classes become those of the file as folders do, by :func:`topk_registry.folders.classes.class_map`.
    """
    from topk_registry.train.setup.datasets import labels_of

    where = f"{name} {split}"
    opened = {"folder": folder, "options": options, "download": download}
    dataset, told = _opened(name, split, class_names, where, opened, ignore_unknown=ignore_unknown)
    return Samples(where, _Images(dataset), labels_of(dataset), "".join(told))


def open_label_sets(
    name: str,
    class_names: Sequence[str],
    *,
    folder: str | None,
    split: str,
    options: dict[str, Any],
    download: bool,
    ignore_unknown: bool = False,
    **settings: Any,
) -> Samples:
    """Images with several labels each, as ``timm train --task multilabel`` reads them, untransformed.

    Args:
        name: of a data set; empty for images that ``labels_csv`` names.
        class_names: of the file; the classes of the data become these by name.
        folder, split, options, download, ignore_unknown: see :func:`open_dataset`.
        settings: ``labels_csv``, ``target_format`` and ``target_key``, as flags of ``timm train``.
    """
    from topk_registry.train.setup.label_sets import k_hot_of

    where = f"{name or settings.get('labels_csv') or folder} {split}"
    opened = {"folder": folder, "options": options, "download": download, "task": "multilabel", **settings}
    dataset, told = _opened(name, split, class_names, where, opened, ignore_unknown=ignore_unknown, several=True)
    targets = k_hot_of(dataset)
    if targets.shape[1] < len(class_names):  # the data lacks the last classes
        targets = np.pad(targets, ((0, 0), (0, len(class_names) - targets.shape[1])))
    return Samples(where, _Images(dataset), targets, "".join(told))


def _opened(
    name: str,
    split: str,
    class_names: Sequence[str],
    where: str,
    opened: dict[str, Any],
    *,
    ignore_unknown: bool,
    several: bool = False,
) -> tuple[Any, list[str]]:
    """The data set under the file's class numbers, and a sentence on how its classes became these."""
    from topk_registry.train.errors import TrainError
    from topk_registry.train.setup.classes import align
    from topk_registry.train.setup.datasets import open_named

    told: list[str] = []
    try:
        dataset = open_named(name, split, **opened)
        if not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"--dataset {name} is a stream: calibration draws its samples at random, and must pick them"
            )
        dataset = align(
            dataset,
            class_names,
            where=where,
            of="the file",
            by_order=True,
            ignore_unknown=ignore_unknown,
            note=lambda mapping: told.append(mapping.told),
            several=several,
        )
    except TrainError as error:
        raise ValueError(f"{error}") from error
    return dataset, told
