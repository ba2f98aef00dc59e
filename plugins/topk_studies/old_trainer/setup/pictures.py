"""Images of a data set as they are stored, and where they come from."""

from typing import Any

from PIL import Image

from topk_registry.data.labels import is_indexed
from topk_studies.old_trainer.setup.unreadable import WatchedImages


def innermost(dataset: Any, index: int) -> tuple[Any, int]:
    """The data set below wrappers such as a ``Selection``, and the image's number in it."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return dataset, index


def path_of(dataset: Any, index: int) -> str:
    """The file of an image, or its number where it has none."""
    inner, place = innermost(dataset, index)
    filename = getattr(inner, "filename", None)
    return str(filename(place)) if callable(filename) else f"sample {place}"


def picture_of(dataset: Any, index: int) -> Image.Image | None:
    """An image as it is stored; None where the data set gives none, or cannot pick or read it."""
    if not is_indexed(dataset):
        return None
    inner, place = innermost(dataset, index)
    if isinstance(inner, WatchedImages):
        return inner.picture(place)
    transform, dataset.transform = getattr(dataset, "transform", None), None
    try:
        image = dataset[index][0]
    finally:
        dataset.transform = transform
    return image if isinstance(image, Image.Image) else None
