"""Folders of images as classes: names, files, and the class of a model for each folder.

As in timm, the class of an image is the name of the folder that directly contains the image. Classes are numbered in
natural order (c2 before c10). Files and folders whose name begins with a dot are skipped, such as ``._x.png`` from
macOS archives and ``.ipynb_checkpoints``.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")  # as in timm
OTHER_IMAGES = (".avif", ".bmp", ".gif", ".heic", ".jfif", ".jxl", ".ppm", ".tif", ".tiff", ".webp")
TRAINING = ("train", "training")
EVALUATION = ("val", "valid", "validation", "eval", "evaluation")
MAX_LISTED = 20


class FolderError(ValueError):
    """Raised if folders cannot be read as classes."""


@dataclass(frozen=True)
class ClassFolders:
    """Class folders and the images in them.

    Args:
        names: names of the folders that contain images, in natural order.
        images: pairs (path, name of the folder), in natural order of paths.
        notes: messages about skipped files and folders.
    """

    names: list[str]
    images: list[tuple[str, str]]
    notes: list[str] = field(default_factory=list)


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Return a sort key as in timm: numbers sort by value, and letters without case. Plain order breaks ties."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())], name


def images_below(root: str | Path, suffixes: Collection[str] = IMAGE_SUFFIXES) -> list[str]:
    """Return the paths of all images in a folder and its subfolders, in natural order."""
    paths = (os.path.join(folder, name) for folder, _, files in _walk(root) for name in files)
    return sorted((path for path in paths if is_image(path, suffixes)), key=natural_key)


def is_image(path: str, suffixes: Collection[str] = IMAGE_SUFFIXES) -> bool:
    """Return whether a file name has an image suffix."""
    name = os.path.basename(path)
    return not name.startswith(".") and _suffix(name) in suffixes


def split_folder(root: str | Path, split: str) -> Path | None:
    """Return the folder of a split, by its name or a synonym that timm knows, or None if there is no such folder."""
    name = split.split("[")[0]
    synonyms = next((group for group in (TRAINING, EVALUATION) if name in group), ())
    return next((Path(root, each) for each in (name, *synonyms) if each and Path(root, each).is_dir()), None)


def read_folders(root: str | Path, suffixes: Collection[str] = IMAGE_SUFFIXES) -> ClassFolders:
    """Find the class folders in a root folder, and count the image files that are skipped because of their format.

    Raises:
        FolderError: there are no images, two folders have the same name, or images are outside of class folders.
    """
    places: dict[str, str] = {}
    images: list[tuple[str, str]] = []
    loose: list[tuple[str, str]] = []
    empty: list[str] = []
    skipped: Counter[str] = Counter()
    problem = ""
    for folder, below, files in _walk(root):
        name = os.path.basename(folder)
        inside = [(os.path.join(folder, file), name) for file in files if is_image(file, suffixes)]
        skipped.update(end for end in map(_suffix, files) if end in OTHER_IMAGES and end not in suffixes)
        if folder == str(root):
            loose = inside
        elif inside:
            if places.setdefault(name, folder) != folder:
                problem = problem or f"two class folders are named {name!r}, {places[name]} and {folder}: rename one"
            images += inside
        elif not below:
            empty.append(name)
    notes: list[str] = []
    if skipped:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in skipped.most_common())
        notes.append(f"skipped {kinds} files of {root}; only {', '.join(sorted(suffixes))} are read")
    if loose and not problem:
        problem = (
            f"{root} contains {count_of(loose, 'image')} outside of class folders, such as "
            f"{os.path.basename(min(loose)[0])}: move each image into a folder with the name of its class"
        )
    if problem or not images:
        problem = problem or f"{root} contains no images ({', '.join(sorted(suffixes))})"
        raise FolderError("; ".join([*notes, problem]))
    if empty := sorted(set(empty) - set(places), key=natural_key):
        notes.append(f"skipped class folders of {root} without images: {listed(empty)}")
    images.sort(key=lambda image: natural_key(image[0]))
    return ClassFolders(sorted(places, key=natural_key), images, notes)


def _walk(root: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    for folder, below, files in os.walk(root, followlinks=True):
        below[:] = sorted((name for name in below if not name.startswith(".")), key=natural_key)
        yield folder, below, [name for name in files if not name.startswith(".")]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def class_map(
    folders: Sequence[str],
    classes: Sequence[str],
    *,
    where: object = "the data",
    of: str = "the model",
    ignore_unknown: bool = False,
) -> tuple[dict[str, int], str]:
    """Map folders to classes by name. If no name matches and there are as many folders as classes, map by order.

    Args:
        folders: folder names, all different.
        classes: class names in order. If the model has no class names, pass the numbers from 0 on as text.
        where: location of the folders, for messages.
        of: owner of the classes, for messages.
        ignore_unknown: skip folders without a class if at least one folder has the name of a class.

    Returns:
        The class number of each folder that is not skipped, by folder name, and a description of the mapping.

    Raises:
        FolderError: a folder has no class, or two classes have the same name.

    Example:
        >>> class_map(["dog", "cat"], ["cat", "dog", "owl"])[0]
        {'dog': 1, 'cat': 0}
    """
    numbers = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in folders if name not in numbers]
    nameless = list(classes) == [str(i) for i in range(len(classes))]
    some_known = len(unknown) < len(folders)
    if len(folders) == len(classes) and (nameless or not some_known):
        ordered = sorted(folders, key=natural_key)
        pairs = [f"{folder} = {name}" for folder, name in zip(ordered, classes, strict=True)]
        why = "the model has no class names" if nameless else "no name matches"
        summary = f"{count_of(folders, 'class')} by order, because {why}: {listed(pairs, MAX_LISTED)}"
        return {name: i for i, name in enumerate(ordered)}, summary
    if unknown and not (ignore_unknown and some_known):
        otherwise = "expected these names, or as many classes in the same order"
        hint = "--ignore-unknown-classes skips them" if some_known else otherwise
        raise FolderError(
            f"{where} has the classes {listed([repr(name) for name in unknown])}, and {of} has "
            f"{count_of(classes, 'class')}: {listed(classes)}; {hint}"
        )
    if twice := sorted({name for name in folders if classes.count(name) > 1}, key=natural_key):
        raise FolderError(f"{of} has several classes named {listed([repr(name) for name in twice])}")
    found = {name: numbers[name] for name in folders if name in numbers}
    missing = [name for name in classes if name not in found]
    summary = f"{count_of(list(found), 'class')} by name"
    for names, text in ((unknown, f"skipped, because {of} has no such class"), (missing, "without images")):
        summary += f"; {text}: {listed(names)}" if names else ""
    return found, summary


def count_of(things: Sequence[object], name: str) -> str:
    """Return a number and its noun as text, such as "1 image" or "2 images"."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 'es' if name.endswith('ss') else 's'}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first names as text, followed by the number of further names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
