"""Held-out images with labels from any data set that ``timm train`` reads."""

from collections.abc import Sequence
from typing import Any

from topk_export.samples import Samples


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
    from topk_registry.train.errors import DataError
    from topk_registry.train.setup.classes import align
    from topk_registry.train.setup.datasets import labels_of, open_named

    told = []
    dataset = open_named(name, split, folder=folder, options=options, download=download)
    if not hasattr(dataset, "__getitem__"):
        raise ValueError(f"--dataset {name} is a stream: calibration draws its samples at random, and must pick them")
    try:
        dataset = align(
            dataset,
            class_names,
            where=f"{name} {split}",
            of="the file",
            by_order=True,
            ignore_unknown=ignore_unknown,
            note=lambda found: told.append(found.told),
        )
    except DataError as error:
        raise ValueError(f"{error}") from error
    return Samples(f"{name} {split}", _Images(dataset), labels_of(dataset), *told)
