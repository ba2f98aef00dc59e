"""The classes of a run's data: image folders as classes, and evaluation under the class numbers of training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import get_img_extensions
from timm.data.readers.reader_image_folder import ReaderImageFolder

from topk_registry.data.labels import class_names_of, is_indexed, kept_labels_of, labels_of
from topk_registry.train.errors import DataError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.data.recipes import Renumbered, RenumberedSets
from topk_studies.old_trainer.folders.classes import ClassMap, class_map
from topk_studies.old_trainer.folders.errors import FolderError
from topk_studies.old_trainer.folders.images import is_image, listed, read_folders
from topk_studies.old_trainer.setup.class_maps import read_class_map
from topk_studies.old_trainer.setup.unreadable import replace_within


class FolderReader(ReaderImageFolder):
    """timm's reader of an image folder, over the images that :func:`read_folders` finds.

    Args:
        root: holds a folder a class.
        suffixes: endings of images.
        numbers: the number of each class, from ``--class-map``; by default classes are counted in natural order.
        flat: see :func:`read_folders`.
    """

    def __init__(
        self, root: str | Path, suffixes: Sequence[str], numbers: dict[str, int] | None, *, flat: bool
    ) -> None:
        self.root = str(root)
        folders = read_folders(root, suffixes, joined=numbers is not None, flat=flat)
        self.class_to_idx = numbers or {name: i for i, name in enumerate(folders.names)}
        self.samples = [(path, self.class_to_idx[name]) for path, name in folders.images if name in self.class_to_idx]
        self.notes = []
        for names, why in (
            (folders.empty, f"hold no images ({', '.join(sorted(suffixes))})"),
            ([name for name in folders.names if name not in self.class_to_idx], "are none of --class-map's"),
        ):
            if names:
                self.notes.append(f"class folders of {root} that {why} are left out: {listed(names)}")
        if not self.samples:
            raise FolderError(f"no class folder of {root} is one of --class-map's: {listed(folders.names)}")


def folder_reader(config: TrainConfig, root: Path, *, flat: bool = False) -> FolderReader:
    """The reader of a split's folder."""
    suffixes = config.input_key.split(";") if config.input_key else sorted(get_img_extensions())
    numbers = read_class_map(config.class_map, root)
    return FolderReader(root, suffixes, numbers, flat=flat)


def is_visible_image(path: str) -> bool:
    """Whether torchvision's image folder should take a file."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return is_image(Path(path).name, IMG_EXTENSIONS)


def align(
    dataset: Any,
    classes: Sequence[str] | None,
    *,
    where: object,
    of: str,
    by_order: bool,
    ignore_unknown: bool,
    note: Callable[[ClassMap], object],
    several: bool = False,
) -> Any:
    """Return a data set under the numbers of ``classes``; itself where it has these or where names are not known.

    Args:
        dataset: of evaluation.
        classes: the names of the classes in their order.
        where: the data, for messages.
        of: whose classes they are, for messages.
        by_order, ignore_unknown: see :func:`class_map`.
        note: takes the mapping, to tell the user.
        several: whether an image has several labels.

    Raises:
        DataError: it has classes that are none of these; the message names them.
    """
    names = class_names_of(dataset)
    if names is None or classes is None:
        return dataset
    try:
        mapping = class_map(names, classes, where=where, of=of, by_order=by_order, ignore_unknown=ignore_unknown)
    except FolderError as error:
        raise DataError(f"{error}; --class-map FILE numbers classes by name") from error
    note(mapping)
    numbers = {i: mapping.numbers[name] for i, name in enumerate(names) if name in mapping.numbers}
    if all(i == number for i, number in numbers.items()) and len(numbers) == len(names):
        return dataset
    if not is_indexed(dataset):
        raise DataError(f"{where} is a stream whose classes are not in the order of {of}'s: {listed(names)}")
    if several:
        return RenumberedSets(dataset, numbers, classes)
    renumbered = Renumbered(dataset, labels_of(dataset), numbers, classes)
    if not len(renumbered):
        raise DataError(f"{where} holds no image of the classes of {of}")
    replace_within(dataset, renumbered.indices)
    return renumbered


def without_images(dataset: Any, classes: Sequence[str]) -> list[str]:
    """The names of the classes that a data set has no image of, as far as it keeps its labels apart."""
    labels = kept_labels_of(dataset)
    if labels is None:
        return []
    present = set(np.unique(labels).tolist())
    return [name for i, name in enumerate(classes) if i not in present]
