"""A CSV file of images with several labels each.

A column that is called ``image``, ``file``, ``filename``, ``path``, ``name`` or ``id``, looked for in this order, or
else the first column, names the image. The labels stand in one of two forms:

    image,labels                image,car,dog,person        a column ``labels``: names with ; or | between them,
    a.jpg,car;person            a.jpg,1,0,1                 or else commas, or else spaces;
    b.jpg,                      b.jpg,0,0,0                 or a column of 0 and 1 for each class

A column ``split`` says which split a row belongs to. Without it every row is of each split. Beside a column ``labels``
other columns are left alone.
"""

import csv
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from topk_studies.old_trainer.folders.images import EVALUATION, TRAINING, listed, natural_key

IMAGE = ("image", "file", "filename", "file_name", "path", "image_name", "image_path", "name", "id")
LABELS = ("labels", "label", "tags", "classes")
SPLIT = "split"
SEPARATORS = (";", "|", ",", None)  # None splits at spaces
NUMBERS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")  # of images: such a line is no header
LISTS = ("[]", "()", "{}")  # what programs write around lists
SHOWN = 200  # characters of a name in a message
FORMS = "a column `labels` of names with ; between them, or a column of 0 and 1 for each class"


@dataclass(frozen=True)
class LabelTable:
    """Images with several labels each.

    Args:
        file: where they come from.
        images: as the file names them [N].
        lines: of the file, for messages [N].
        classes: the names of the classes [n].
        targets: 1 for the labels of an image, else 0 [N, n].
        told: how labels were read, for the plan of a run.
    """

    file: str
    images: list[str]
    lines: list[int]
    classes: list[str]
    targets: NDArray[np.uint8]
    told: str


def read_label_table(file: str | Path, *, split: str = "", class_map: Mapping[str, int] | None = None) -> LabelTable:
    """Read the rows of a split.

    Args:
        file: the CSV file.
        split: where the file has a column ``split``, the rows to take; empty for all.
        class_map: the number of each class; without it classes are in the order of their columns, or by name.

    Raises:
        ValueError: the file cannot be read; the message names the line, what was expected and what was found.
    """
    columns, rows = _read(file)
    if Path(columns[0]).suffix.lower() in ENDINGS:
        raise ValueError(f"{file}, line 1: expected the names of columns, got {columns[0]!r}, the name of an image")
    image = next((name for wanted in IMAGE for name in columns if name.lower() == wanted), columns[0])
    one = next((name for name in columns if name.lower() in LABELS and name != image), None)
    rest = [name for name in columns if name not in (image, one) and name.lower() != SPLIT]
    if one is None and not rest:
        raise ValueError(f"{file}: expected {FORMS} beside {image!r}, got the columns {listed(columns)}")
    _check_images(file, image, rows)
    if one is None and "" in rest:
        raise ValueError(
            f"{file}, line 1: expected a name for each column, got none for column {columns.index('') + 1}; pandas "
            "writes such a column where to_csv has no index=False"
        )
    if one is not None:
        classes, sets, told = _names(file, rows, one)
    else:
        classes, sets, told = rest, [_flags(file, line, row, rest) for line, row in rows], "a column for each class"
    numbers = _numbers(file, rows, classes, sets, class_map and {_composed(name): c for name, c in class_map.items()})
    rows, sets = _of_split(file, columns, rows, sets, split)
    targets = np.zeros((len(rows), max(numbers.values()) + 1), np.uint8)
    for target, names in zip(targets, sets, strict=True):
        target[[numbers[name] for name in names]] = 1
    by_number = {number: name for name, number in numbers.items()}
    return LabelTable(
        file=str(file),
        images=[row[image] for _, row in rows],
        lines=[line for line, _ in rows],
        classes=[by_number.get(c, str(c)) for c in range(targets.shape[1])],
        targets=targets,
        told=told,
    )


class TableReader:
    """The images of a table as timm's readers give them: an open file and a target.

    Args:
        table: names and targets.
        root: the folder that names are relative to.
        suffixes: endings to try where a name has no file of its own.

    Raises:
        ValueError: files are missing; the message lists the first.
    """

    def __init__(self, table: LabelTable, root: str | Path, suffixes: Sequence[str]) -> None:
        self.root, self.targets, self.notes = str(root), table.targets, [f"labels of {table.file}: {table.told}"]
        self.class_to_idx = {name: c for c, name in enumerate(table.classes)}
        paths = [file_of(Path(root), name, suffixes) for name in table.images]
        first: dict[str, int] = {}
        for line, name, path in zip(table.lines, table.images, paths, strict=True):
            before = line if path is None else first.setdefault(os.path.normpath(path), line)
            if before != line:
                raise ValueError(
                    f"{table.file}, line {line}: expected each image once, got {name!r}, the file of line {before}"
                )
        missing = [
            f"line {line}: {name if len(name) <= SHOWN else name[:SHOWN] + '...'}"
            for line, name, path in zip(table.lines, table.images, paths, strict=True)
            if path is None
        ]
        if missing:
            raise ValueError(
                f"{table.file}: {len(missing)} of {len(paths)} images are not in {root}: {listed(missing)}"
            )
        self.samples = list(zip(map(str, paths), table.targets, strict=True))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, NDArray[np.uint8]]:
        path, target = self.samples[index]
        return open(path, "rb"), target

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """The path of an image: whole, below the root, or its last part."""
        path = Path(self.samples[index][0])
        if basename:
            return path.name
        return str(path if absolute or not path.is_relative_to(self.root) else path.relative_to(self.root))

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        """The path of every image."""
        return [self.filename(i, basename, absolute) for i in range(len(self))]


def as_target(row: Any) -> torch.Tensor:
    """A row of 0 and 1 as a float32 vector [n]."""
    return torch.from_numpy(np.asarray(row, np.float32))


Row = tuple[int, dict[str, str]]


def _read(file: str | Path) -> tuple[list[str], list[Row]]:
    """The columns, and each row with its line."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:  # spreadsheets write a byte order mark
            header = stream.readline()
            stream.seek(0)
            reader = csv.reader(stream, delimiter=max(",;\t", key=header.count))
            columns = [_composed(name.strip()) for name in next(reader, [])]
            rows = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {file}: it is not in UTF-8 ({error}); save it as CSV UTF-8") from error
    except (OSError, csv.Error) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not columns or not rows:
        raise ValueError(f"{file}: expected a line of column names and a row for each image, got {len(rows)} rows")
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{file}, line 1: expected a name for each column, got {twice!r} twice")
    for line, cells in rows:
        if len(cells) != len(columns):
            raise ValueError(f"{file}, line {line}: expected {len(columns)} cells as in line 1, got {len(cells)}")
    return columns, [(line, dict(zip(columns, map(str.strip, cells), strict=True))) for line, cells in rows]


def _check_images(file: str | Path, image: str, rows: Sequence[Row]) -> None:
    first: dict[tuple[str, str], int] = {}
    for line, row in rows:
        if not row[image]:
            raise ValueError(f"{file}, line {line}: expected the name of an image in column {image!r}, got nothing")
        split = next((value for name, value in row.items() if name.lower() == SPLIT), "")
        before = first.setdefault((row[image], split), line)
        if before != line:
            raise ValueError(f"{file}, line {line}: expected each image once, got {row[image]!r} again, as in line "
                             f"{before}")  # fmt: skip


def _names(file: str | Path, rows: Sequence[Row], column: str) -> tuple[list[str], list[list[str]], str]:
    """The classes, the labels of each row, and how they were read, of one column of names."""
    for line, row in rows:
        if row[column][:1] + row[column][-1:] in LISTS:
            raise ValueError(
                f"{file}, line {line}: expected names with ; between them in column {column!r}, got the list "
                f"{row[column]}"
            )
    cells = [_composed(row[column]) for _, row in rows]
    separator = next(s for s in SEPARATORS if s is None or any(s in cell for cell in cells))
    sets = [[name.strip() for name in cell.split(separator) if name.strip()] for cell in cells]
    classes = sorted({name for names in sets for name in names}, key=natural_key)
    return classes, sets, f"names in column {column!r} with {repr(separator) if separator else 'spaces'} between them"


def _composed(name: str) -> str:
    """A name with each letter written in one way: Unicode has two for those with accents."""
    return unicodedata.normalize("NFC", name)


def _flags(file: str | Path, line: int, row: Mapping[str, str], classes: Sequence[str]) -> list[str]:
    """The labels of a row with a column of 0 and 1 for each class."""
    for name in classes:
        if row[name].lower() not in NUMBERS:
            raise ValueError(
                f"{file}, line {line}: expected 0 or 1 in column {name!r}, got {row[name]!r}; the labels are {FORMS}"
            )
    return [name for name in classes if NUMBERS[row[name].lower()]]


def _numbers(
    file: str | Path,
    rows: Sequence[Row],
    classes: Sequence[str],
    sets: Sequence[Sequence[str]],
    class_map: Mapping[str, int] | None,
) -> dict[str, int]:
    if class_map is None:
        if not classes:
            raise ValueError(f"{file}: expected a label in some row, got none")
        return {name: c for c, name in enumerate(classes)}
    for (line, _), names in zip(rows, sets, strict=True):
        for name in names:
            if name not in class_map:
                raise ValueError(f"{file}, line {line}: label {name!r} is none of --class-map's: "
                                 f"{listed(list(class_map))}")  # fmt: skip
    return dict(class_map)


def has_splits(file: str | Path) -> bool:
    """Whether the file says which split a row belongs to."""
    return any(name.lower() == SPLIT for name in _read(file)[0])


def _of_split(
    file: str | Path, columns: Sequence[str], rows: list[Row], sets: list[list[str]], split: str
) -> tuple[list[Row], list[list[str]]]:
    column = next((name for name in columns if name.lower() == SPLIT), None)
    if column is None or not split:
        return rows, sets
    group = next((group for group in (TRAINING, EVALUATION) if split in group), ())
    for name in (split, *group):
        taken = [i for i, (_, row) in enumerate(rows) if row[column] == name]
        if taken:
            break
    else:
        known = list(dict.fromkeys(row[column] for _, row in rows))
        raise ValueError(f"{file} has no row of split {split!r}; column {column!r} has {listed(known)}")
    return [rows[i] for i in taken], [sets[i] for i in taken]


def file_of(root: Path, name: str, suffixes: Sequence[str]) -> Path | None:
    """The file of an image below a folder, its ending left out or not; None where there is none."""
    path = root / name
    tried = (path.with_name(path.name + suffix) for suffix in suffixes) if path.name else ()
    try:
        return next((each for each in (path, *tried) if each.is_file()), None)
    except OSError:  # no system has a name of that length
        return None
