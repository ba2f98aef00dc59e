"""Rows of a CSV file that leave samples out of training or give them other labels.

The file is what ``topk-registry labels --csv`` writes: a row a sample, by its path below the data's directory or by its
number. A person fills the column ``action``.
"""

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from topk_registry.data.labels import Labels
from topk_studies.old_trainer.data.recipes import Indices
from topk_studies.old_trainer.folders.images import listed

ACTIONS = ("exclude", "relabel", "keep")
MOST_COMPARED = 20_000  # names that are searched for the nearest one: a second


@dataclass(frozen=True)
class Correction:
    """A row of the file.

    Args:
        line: where it stands, for messages.
        image: the name of the sample.
        label: the class that the file says it has; empty where it does not say.
        suggested: the class that it should have; empty where it does not say.
    """

    line: int
    image: str
    label: str
    suggested: str


@dataclass(frozen=True)
class Corrections:
    """Rows of one action.

    Args:
        file: where they come from.
        rows: one a sample.
        others: how many rows of the file have each of the other actions that change training.
    """

    file: str
    rows: list[Correction]
    others: Mapping[str, int]

    def places(self, names: Sequence[str], labels: Labels, classes: Sequence[str], root: str | None) -> Indices:
        """The sample of each row [R].

        Args:
            names: of all samples [N].
            labels: of all samples [N], compared with those that the file says.
            classes: the words for classes [n].
            root: the data's directory, for rows with a whole path.

        Raises:
            ValueError: a row names no sample, or one of another label.
        """
        number = {name: i for i, name in enumerate(names)}
        places = []
        for row in self.rows:
            place = number.get(_relative(row.image, root))
            if place is None:
                raise ValueError(f"{self._at(row)}: there is no sample {row.image!r}{_nearest(row.image, names)}")
            now = int(labels[place])
            if row.label and row.label not in (classes[now], str(now)):
                raise ValueError(
                    f"{self._at(row)}: sample {row.image!r} has the label {classes[now]!r}, the file says "
                    f"{row.label!r}: is the file of another split, data set or seed?"
                )
            places.append(place)
        return np.asarray(places, np.int64)

    def suggestions(self, classes: Sequence[str]) -> Labels:
        """The class of each row [R].

        Raises:
            ValueError: a row has none, or one that is not known.
        """
        number = {name: i for i, name in enumerate(classes)}
        return np.asarray([self._class(row, number) for row in self.rows], np.int64)

    def _class(self, row: Correction, number: dict[str, int]) -> int:
        word = row.suggested
        if word in number:
            return number[word]
        if word.isdecimal() and int(word) < len(number):
            return int(word)
        told = f"class {word!r} is not known" if word else "the column 'suggested' is empty"
        raise ValueError(f"{self._at(row)}: {told}; classes are {listed(list(number))}{_nearest(word, list(number))}")

    def _at(self, row: Correction) -> str:
        return f"{self.file}, line {row.line}"


def read_corrections(file: str | Path, action: str) -> Corrections:
    """Read the rows whose column ``action`` says ``action``; all rows of a file without this column.

    The columns are ``image``, and where they matter ``label``, ``suggested`` and ``action``; others are not read.

    Raises:
        ValueError: the file cannot be read, or no row says so.
    """
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--{action} {file}: {error}") from error
    header = text.partition("\n")[0]
    reader = csv.DictReader(text.splitlines(), delimiter=max(",;\t", key=header.count))
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    if "image" not in columns or (action == "relabel" and "suggested" not in columns):
        wanted = "image and suggested" if action == "relabel" else "image"
        raise ValueError(f"--{action} {file}: expected a CSV file with the columns {wanted}, got {listed(columns)}")
    rows: dict[str, Correction] = {}
    said, others = 0, Counter[str]()
    for cells in reader:
        row = {name: (cells.get(name) or "").strip() for name in ("image", "label", "suggested", "action")}
        if not row["image"]:
            continue
        if row["action"].lower() not in (*ACTIONS, ""):
            raise ValueError(
                f"{file}, line {reader.line_num}: action {row['action']!r} is not known; it is {', '.join(ACTIONS)}, "
                "or empty"
            )
        if "action" in columns and row["action"].lower() != action:
            others[row["action"].lower()] += 1
            continue
        said += 1
        new = Correction(reader.line_num, row["image"], row["label"], row["suggested"])
        old = rows.setdefault(new.image, new)
        if action == "relabel" and old.suggested != new.suggested:
            raise ValueError(
                f"{file}: {new.image!r} has two labels, {old.suggested!r} in line {old.line} and {new.suggested!r} in "
                f"line {new.line}"
            )
    if not said:
        raise ValueError(f"--{action} {file}: no row has the action {action!r}: fill the column 'action'")
    return Corrections(str(file), list(rows.values()), {each: others[each] for each in ACTIONS[:2] if others[each]})


def digest_of(file: str | Path) -> str:
    """The SHA-256 of a file's content; empty where it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _relative(image: str, root: str | None) -> str:
    if root and os.path.isabs(image) and Path(image).is_relative_to(os.path.abspath(root)):
        return Path(os.path.relpath(image, root)).as_posix()
    return image


def _nearest(word: str, known: Sequence[str]) -> str:
    """The nearest known name, for the end of a message: one of the same file name, of the same folder, or any."""
    folder, _, file = word.rpartition("/")
    for some in (
        [name for name in known if name.rpartition("/")[2] == file],
        [name for name in known if name.rpartition("/")[0] == folder],
        known,
    ):
        if close := get_close_matches(word, some[:MOST_COMPARED], n=1):
            return f"; the nearest is {close[0]!r}"
    return ""
