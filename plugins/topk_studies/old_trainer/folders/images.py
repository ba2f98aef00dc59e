"""The class folders below a root, as timm reads them: the folder that an image lies in names its class.

Names that begin with a dot are no images and no classes: macOS writes ``._x.png`` beside ``x.png`` into archives, and
notebooks leave ``.ipynb_checkpoints``.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from topk_studies.old_trainer.folders.errors import FolderError

TRAINING = ("train", "training")
EVALUATION = ("val", "valid", "validation", "eval", "evaluation")


@dataclass(frozen=True)
class ClassFolders:
    """Folders that name classes, and the images in them.

    Args:
        root: all are below it.
        names: of the folders that hold images, in natural order: c2 comes before c10.
        images: pairs of the path of an image and the name of its folder, in natural order of paths.
        empty: names of the folders that hold no image.
    """

    root: Path
    names: list[str]
    images: list[tuple[str, str]]
    empty: list[str]


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Order names as timm does, numbers by value; names that differ by case or zeros alone come in plain order."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())], name


def is_hidden(name: str) -> bool:
    return name.startswith(".")


def is_image(name: str, suffixes: Collection[str]) -> bool:
    """Whether a file of this name is an image."""
    return not is_hidden(name) and os.path.splitext(name)[1].lower() in suffixes


def images_below(root: str | Path, suffixes: Collection[str]) -> list[str]:
    """The paths of all images below a folder, in natural order."""
    paths = (
        os.path.join(folder, name) for folder, _, files in _walk(root) for name in files if is_image(name, suffixes)
    )
    return sorted(paths, key=natural_key)


def split_folder(root: str | Path, split: str) -> Path | None:
    """The folder of a split, under its own name or a synonym that timm knows; None where there is none."""
    name = split.split("[")[0]
    group = next((group for group in (TRAINING, EVALUATION) if name in group), ())
    return next((Path(root, each) for each in (name, *group) if each and Path(root, each).exists()), None)


def read_folders(
    root: str | Path, suffixes: Collection[str], *, joined: bool = False, flat: bool = False
) -> ClassFolders:
    """Find the class folders below a root.

    Args:
        root: a folder.
        suffixes: endings of images, in lower case with their dot.
        joined: whether folders of one name in different places are one class.
        flat: whether images may lie in the root itself, where there are no class folders; their class has no name.

    Raises:
        FolderError: two folders have one name, images lie in no class folder, or there are none.
    """
    places: dict[str, str] = {}
    images: list[tuple[str, str]] = []
    loose: list[tuple[str, str]] = []
    empty: list[str] = []
    for folder, below, files in _walk(root):
        name = os.path.basename(folder)
        inside = [(os.path.join(folder, file), name) for file in files if is_image(file, suffixes)]
        if folder == str(root):
            loose = inside
        elif inside:
            if places.setdefault(name, folder) != folder and not joined:
                raise FolderError(
                    f"two class folders are called {name!r}, {places[name]} and {folder}: rename one, or say by "
                    "--class-map that they are one class"
                )
            images += inside
        elif not below:
            empty.append(name)
    if not (images or loose):
        raise FolderError(f"{root} holds no images ({', '.join(sorted(suffixes))})")
    if loose and flat and not images:
        places, images = {"": str(root)}, [(path, "") for path, _ in loose]
    elif loose:
        raise FolderError(
            f"{root} holds {count_of(loose, 'image')} in no class folder, such as {os.path.basename(min(loose)[0])}: "
            "each must lie in a folder with the name of its class"
        )
    images.sort(key=lambda image: natural_key(image[0]))
    return ClassFolders(
        Path(root), sorted(places, key=natural_key), images, sorted(set(empty) - set(places), key=natural_key)
    )


def _walk(root: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = sorted((name for name in below if not is_hidden(name)), key=natural_key)
        yield folder, below, files


def count_of(things: Sequence[object], name: str) -> str:
    """Their number and name: 1 image, 2 images."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 'es' if name.endswith('ss') else 's'}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """The names for a sentence, the first ``most`` of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
