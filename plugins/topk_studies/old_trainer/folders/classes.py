"""Which class of a model each folder stands for.

Folders stand for the classes whose names they have. Where no folder has the name of a class they are taken in natural
order, as training takes them; some by name and others by order would shift labels without a word, and is refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from topk_studies.old_trainer.folders.errors import FolderError
from topk_studies.old_trainer.folders.images import count_of, listed, natural_key

MOST_SHOWN = 20


@dataclass(frozen=True)
class ClassMap:
    """The class number of each folder.

    Args:
        numbers: by the folder's name; a folder that is left out is not among them.
        by_name: whether folders have the names of classes; else they are taken in natural order.
        left_out: names of the folders that stand for no class.
        missing: names of the classes that no folder stands for.
        told: a sentence about the mapping.
    """

    numbers: dict[str, int]
    by_name: bool
    left_out: list[str]
    missing: list[str]
    told: str


def class_map(
    folders: Sequence[str],
    classes: Sequence[str],
    *,
    where: object = "the data",
    of: str = "the model",
    by_order: bool = True,
    ignore_unknown: bool = False,
) -> ClassMap:
    """Map folders to classes: by exact names, or all of them by natural order where no name matches.

    Args:
        folders: their names, of which no two are equal.
        classes: the name of each class in order; where the model names none, the numbers from 0 as text.
        where: the place of the folders, for messages.
        of: whose classes they are, for messages.
        by_order: whether folders without the name of any class may stand for the classes in their order.
        ignore_unknown: leave folders out that have the name of no class, where others have one.

    Raises:
        FolderError: folders cannot be told; the message names them.

    Example:
        >>> class_map(["dog", "cat"], ["cat", "dog", "owl"]).numbers
        {'dog': 1, 'cat': 0}
    """
    numbers = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in folders if name not in numbers]
    nameless = list(classes) == [str(i) for i in range(len(classes))]
    known = len(unknown) < len(folders)
    if by_order and len(folders) == len(classes) and (nameless or not known):
        ordered = sorted(folders, key=natural_key)
        in_order = {name: i for i, name in enumerate(ordered)}
        return ClassMap(in_order, False, [], [], _by_order(ordered, classes, nameless=nameless))
    if unknown and not (ignore_unknown and known):
        raise FolderError(_strange(unknown, folders, classes, where, of, by_order=by_order))
    counts = Counter(classes)
    twice = sorted((name for name in folders if counts[name] > 1), key=natural_key)
    if twice:
        raise FolderError(
            f"{of} has several classes called {listed([repr(name) for name in twice])}, so that a folder of this name "
            "stands for none: give its classes names of their own"
        )
    chosen = {name: numbers[name] for name in folders if name in numbers}
    missing = [name for name in classes if name not in chosen]
    told = f"{count_of(list(chosen), 'class')} by name"
    for names, text in ((unknown, f"left out, as {of} has none of this name"), (missing, "without images")):
        told += f"; {text}: {listed(names)}" if names else ""
    return ClassMap(chosen, True, unknown, missing, told)


def _by_order(folders: Sequence[str], classes: Sequence[str], *, nameless: bool) -> str:
    pairs = [f"{folder} = {name}" for folder, name in zip(folders, classes, strict=True)]
    why = "the model names none" if nameless else "no name is the same"
    return f"{count_of(folders, 'class')} in order, as {why}: {listed(pairs, MOST_SHOWN)}"


def _strange(
    unknown: Sequence[str], folders: Sequence[str], classes: Sequence[str], where: object, of: str, *, by_order: bool
) -> str:
    names = listed([repr(name) for name in unknown])
    expected = f"{of} has {count_of(classes, 'class')}: {listed(classes)}"
    if len(unknown) < len(folders):
        return f"{where} has the classes {names}, and {expected}. --ignore-unknown-classes leaves the others out"
    wanted = f"these names{', or as many classes in the same order' * by_order}"
    return f"{where} has {count_of(folders, 'class')}, {names}, and {expected}; expected {wanted}"
