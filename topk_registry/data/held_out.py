"""Which images of a class folder a training run held out, so that later commands evaluate on these images only.

A record of a run is a dictionary of plain values. Checkpoints contain the settings from which :func:`record_of` makes
the record, and exported files store the record. This module needs no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topk_registry.data.folders import SPLITS, split_folder
from topk_registry.errors import FolderError

Indices = NDArray[np.int64]
Record = Mapping[str, Any]
# options of a data set that change the training images after a part was held out
CHANGES = ("noise", "noise_kind", "long_tail", "subset", "change_seed")


def pick(labels: Indices, counts: Sequence[int], *, seed: int) -> Indices:
    """Return the indices, in ascending order, of ``counts[c]`` random samples of each class c."""
    # the first counts[c] samples of a random order, so a larger count draws all samples that a smaller count draws
    order = np.random.default_rng([seed, 13]).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    starts = np.searchsorted(labels[order], np.arange(len(counts)))
    return np.sort(np.concatenate([order[start : start + count] for start, count in zip(starts, counts, strict=True)]))


def held_out_indices(labels: Indices, counts: Sequence[int], fraction: float, *, seed: int) -> Indices:
    """Return the indices of the samples to hold out: ``fraction`` of each class, but at least one and not all."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"the held-out fraction must be in (0, 1), got {fraction!r}")
    sizes = [max(0, min(max(1, round(fraction * count)), count - 1)) for count in counts]
    return pick(labels, sizes, seed=seed)


def record_of(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a run from its settings. None: the settings do not say on which data the run trained."""
    if "val_split" not in settings or settings.get("dataset") == "own-batches":
        return None
    options = settings.get("dataset_opt") or {}
    folder = settings.get("data_dir")
    return {
        "dataset": settings.get("dataset") or "",
        "folder": Path(folder).name if folder else "",  # without parent folders, because users share exported files
        "train_split": settings.get("train_split") or "train",
        "val_split": str(settings["val_split"]),
        "seed": int(options.get("change_seed", options.get("seed", 0))),
        "dataset_opt": dict(options),
    }


def fraction_of(record: Record | None) -> float:
    """Return the fraction of the training images that a run held out. 0: the run held out no fraction."""
    try:
        return float((record or {}).get("val_split", ""))
    except ValueError:
        return 0.0


def has_splits(root: str | Path) -> bool:
    """Return whether a folder contains a folder for any split, such as ``train`` or ``test``."""
    return any(split_folder(root, split) is not None for split in SPLITS)


def images_to_use(
    root: str | Path, records: Mapping[str, Record | None], *, all_images: bool = False
) -> tuple[float, int, str]:
    """Choose the images on which models are evaluated, such that no model was trained on these images.

    Args:
        root: folder without splits, with one folder per class, or the name of other data.
        records: the record of the training run of each model by name, or None if it is unknown.
        all_images: whether the user asks for all images.

    Returns:
        The fraction of the images that training held out and the seed of this choice, or (0.0, 0) for all images, and a
        line of text for the user.

    Raises:
        FolderError: a model was trained on all images, or the models held out different images.
    """
    if all_images:
        return 0.0, 0, f"all images of {root} (--all-images), perhaps images of training"
    known = {name: record for name, record in records.items() if record is not None}
    unknown = [name for name, record in records.items() if record is None]
    note = f"; {', '.join(unknown)} records no images of training" if unknown else ""
    chosen = next((record for record in known.values() if fraction_of(record)), None)
    if chosen and any(_part(record) != _part(chosen) for record in known.values()):
        told = "; ".join(f"{name}: --val-split {r['val_split']}, seed {r['seed']}" for name, r in known.items())
        raise FolderError(
            f"the models held out different images for evaluation ({told}), so some of them were trained on images of "
            f"{root}: give images that no model was trained on, or pass --all-images"
        )
    if chosen:
        fraction, seed, _ = _part(chosen)
        return fraction, seed, f"the {100 * fraction:g} % of {root} that training held out{note}; see --all-images"
    place = Path(root).absolute()
    for name, record in known.items():
        of_training = place.name in (record["folder"], record["train_split"]) and record["folder"] in place.parts[-2:]
        if record["folder"] and of_training:
            raise FolderError(
                f"{name} was trained on all images of {root}: give images that it was not trained on, or pass "
                "--all-images"
            )
    return 0.0, 0, f"all images of {root}, which has no splits{note}"


def _part(record: Record) -> tuple[float, int, dict[str, Any]]:
    """Return what decides which images are held out: the fraction, the seed, and the options of the data set."""
    own = {name: value for name, value in record["dataset_opt"].items() if name not in CHANGES}
    return fraction_of(record), record["seed"], own
