"""Files of ``--class-map``: the number of each class, by timm's reader."""

import operator
from pathlib import Path

from timm.data.readers.class_map import load_class_map

MARK = "\ufeff"  # what spreadsheets write before the first name


def read_class_map(file: str, root: Path) -> dict[str, int] | None:
    """The number of each class name; None without a file.

    An empty line of a ``.txt`` is no class: timm's reader gives it a name of no letters, and a number.

    Args:
        file: a path, or a name below ``root``.
        root: the folder of the images.

    Raises:
        ValueError: the file is of another form, or numbers do not count from 0.
    """
    if not file:
        return None
    try:
        given = load_class_map(file, str(root))
        numbers = {str(name).removeprefix(MARK): operator.index(number) for name, number in given.items()}
    except (AssertionError, TypeError, EOFError, KeyError, IndexError) as error:
        raise ValueError(
            f"--class-map {file}: expected a .txt with a name a line, or a .pkl of a dictionary from names to numbers "
            f"from 0 on: {error}"
        ) from error
    numbers = {name: number for name, number in numbers.items() if name.strip()}
    if not numbers:
        raise ValueError(f"--class-map {file} names no class")
    if min(numbers.values()) < 0:
        name = min(numbers, key=numbers.__getitem__)
        raise ValueError(f"--class-map {file}: numbers of classes count from 0, got {numbers[name]} for {name!r}")
    return numbers
