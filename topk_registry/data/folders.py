"""Functions that find class folders and their images, and that map class folders to the classes of a model.

As in timm, the class of an image is the name of the folder that directly contains the image. Classes are numbered from
0 in natural order of their names (c2 before c10). Files and folders whose names begin with a dot are skipped. Such
names are, for example, ``._x.png`` from macOS archives and ``.ipynb_checkpoints``.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from topk_registry.errors import FolderError

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")  # as in timm
OTHER_IMAGES = (".avif", ".bmp", ".gif", ".heic", ".jfif", ".jxl", ".ppm", ".tif", ".tiff", ".webp")
TRAINING = ("train", "training")
EVALUATION = ("val", "valid", "validation", "eval", "evaluation")
SPLITS = (*TRAINING, *EVALUATION, "test", "calibration")


@dataclass(frozen=True)
class ClassFolders:
    """The class folders in a root folder, and the images in the class folders."""

    names: list[str]  # names of the folders that contain images, in natural order
    images: list[tuple[str, str]]  # (path of the image, name of its folder), in natural order of the paths
    notes: list[str] = field(default_factory=list)  # messages for the user about skipped files and folders


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Return a sort key for a name. As in timm, c2 is before c10. Case matters only for names such as cat and Cat."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower())], name


def images_below(root: str | Path, suffixes: Collection[str] = IMAGE_SUFFIXES) -> list[str]:
    """Return the paths of all images in ``root`` and in all folders below ``root``, in natural order."""
    found = (os.path.join(folder, name) for folder, _, files in _walk(root) for name in files)
    return sorted((path for path in found if _suffix(path) in suffixes), key=natural_key)


def split_folder(root: str | Path, split: str) -> Path | None:
    """Return the subfolder of ``root`` named ``split`` (or a synonym, such as val). If there is none, return None."""
    name = split.split("[")[0]
    synonyms = next((group for group in (TRAINING, EVALUATION) if name in group), ())
    return next((Path(root, each) for each in (name, *synonyms) if each and Path(root, each).is_dir()), None)


def folder_of(root: str | Path, split: str) -> Path:
    """Return the folder of a split: a subfolder of ``root``, or ``root`` itself if no split has a subfolder."""
    if found := split_folder(root, split):
        return found
    # a folder without subfolders is not a split, but a class, such as the class "train" of CIFAR-100
    if others := [name for name in SPLITS if any(path.is_dir() for path in Path(root, name).glob("*"))]:
        raise FolderError(f"{root} has no split {split!r}; it has {listed(others)}")
    return Path(root)


def read_folders(root: str | Path, suffixes: Collection[str] = IMAGE_SUFFIXES) -> ClassFolders:
    """Find the class folders below ``root``, at any depth, and the images in these folders.

    Image files with a suffix that is not in ``suffixes`` are skipped, and folders without images are skipped. The
    ``notes`` of the result list these suffixes and folders.

    Raises:
        FolderError: there are no images, two class folders have the same name, or an image is directly in ``root``.
    """
    places: dict[str, str] = {}
    images: list[tuple[str, str]] = []
    empty: set[str] = set()
    skipped: Counter[str] = Counter()
    for folder, below, files in _walk(root):
        name = os.path.basename(folder)
        inside = [(os.path.join(folder, file), name) for file in files if _suffix(file) in suffixes]
        skipped.update(end for end in map(_suffix, files) if end in OTHER_IMAGES and end not in suffixes)
        if inside and folder == str(root):
            raise FolderError(
                f"{root} contains {count_of(inside, 'image')} outside of class folders, such as "
                f"{os.path.basename(min(inside)[0])}: move each image into a folder with the name of its class"
            )
        if inside and places.setdefault(name, folder) != folder:
            raise FolderError(f"two class folders are named {name!r}, {places[name]} and {folder}: rename one")
        if not inside and not below:
            empty.add(name)
        images += inside
    notes: list[str] = []
    if skipped:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in skipped.most_common())
        notes.append(f"skipped {kinds} files of {root}; only {', '.join(sorted(suffixes))} are read")
    if not images:
        raise FolderError("; ".join([*notes, f"{root} contains no images ({', '.join(sorted(suffixes))})"]))
    if unused := sorted(empty - set(places), key=natural_key):
        notes.append(f"skipped class folders of {root} without images: {listed(unused)}")
    images.sort(key=lambda image: natural_key(image[0]))
    return ClassFolders(sorted(places, key=natural_key), images, notes)


def _walk(root: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    below, files = [], []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    below.append(entry.name)
                elif entry.is_file() or not os.path.exists(entry.path):  # a dangling link is reported when it is read
                    files.append(entry.name)  # a named pipe is skipped: reading it would wait for ever
    except OSError:  # an unreadable folder counts as a folder without images
        yield str(root), [], []
        return
    below.sort(key=natural_key)
    yield str(root), below, files
    for name in below:
        yield from _walk(os.path.join(root, name))


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
    """Find the class of each folder.

    Usually, the class of a folder is the class with the same name. If no folder has the name of a class, and there are
    as many folders as classes, the i-th folder in natural order gets class i. For a model without class names, the i-th
    folder also gets class i if there are as many folders as classes.

    Args:
        folders: folder names, all different.
        classes: class names in the order of the class indices. For a model without class names, pass "0", "1", ...
        where, of: names in error messages: ``where`` is the name of the data, and ``of`` the name of the model.
        ignore_unknown: whether to skip a folder without a class of the same name, instead of raising an error. At least
            one folder must have the name of a class.

    Returns:
        A dictionary from folder names to class indices, without skipped folders, and a text that describes the mapping.

    Raises:
        FolderError: a folder has no class, or two classes have the name of the folder.

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
        summary = f"{count_of(folders, 'class')} by order, because {why}: {listed(pairs, 20)}"
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
    """Return a text such as "1 image" or "2 images"."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 'es' if name.endswith('ss') else 's'}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first ``most`` names, separated by commas. If there are more names, append "and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
