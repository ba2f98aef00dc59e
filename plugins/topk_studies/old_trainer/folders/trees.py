"""A tree of classes, such as a taxonomy, read from a file.

The classes are the leaves. A file has one of these forms:

    child,parent              family,genus,species                    {"carrion crow": "crows",
    carrion crow,crows        Corvidae,Corvus,carrion crow             "rook": "crows",
    rook,crows                Corvidae,Corvus,rook                     "crows": "birds", ...}

a CSV file with the columns ``child`` and ``parent``; a CSV file with a column a level, from the root to the class,
where empty cells are left out; a JSON object from child to parent, or a JSON list with the parent of each class. A file
of superclasses is such a tree of two levels. Several roots get one above them, ``all``.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from topk_studies.old_trainer.folders.images import listed

ROOT = "all"
FORMS = "a CSV file with the columns child and parent or with a column a level, or JSON from child to parent"


@dataclass(frozen=True)
class ClassTree:
    """A tree whose leaves are classes.

    Args:
        names: of the nodes; the first are the classes, in order.
        parents: the number of each node's parent, which is larger than its own; -1 for the root, the last.
    """

    names: tuple[str, ...]
    parents: tuple[int, ...]

    @property
    def num_classes(self) -> int:
        return len(self.parents) - len({parent for parent in self.parents if parent >= 0})

    @cached_property
    def members(self) -> NDArray[np.bool_]:
        """The classes of each node, bool [nodes, n]."""
        inside = np.zeros((len(self.parents), self.num_classes), bool)
        np.fill_diagonal(inside, True)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                inside[parent] |= inside[node]
        return inside

    def above(self, node: int) -> list[int]:
        """The node and its ancestors, up to the root."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path


def read_tree(file: str | Path, classes: Sequence[str]) -> ClassTree:
    """Read the tree of these classes from a CSV or JSON file.

    Raises:
        ValueError: the file is no tree whose leaves are the classes; the message names the nodes at fault.
    """
    try:
        return tree_of(_pairs(Path(file), classes), classes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def tree_of(pairs: Iterable[tuple[str, str]], classes: Sequence[str]) -> ClassTree:
    """The tree of these classes from its pairs of child and parent."""
    parent_of: dict[str, str] = {}
    for child, parent in pairs:
        known = parent_of.setdefault(child, parent)
        if known != parent:
            raise ValueError(f"{child!r} has two parents, {known!r} and {parent!r}: a tree has one for each node")
    _check_leaves(parent_of, classes)
    inner = _from_below(parent_of, classes)
    roots = [name for name in dict.fromkeys((*classes, *inner)) if name not in parent_of]
    if len(roots) > 1:
        root = ROOT if ROOT not in {*classes, *inner} else f"({ROOT})"
        parent_of |= dict.fromkeys(roots, root)
        inner.append(root)
    names = (*classes, *inner)
    number = {name: i for i, name in enumerate(names)}
    return ClassTree(names, tuple(number[parent_of[name]] if name in parent_of else -1 for name in names))


def _check_leaves(parent_of: Mapping[str, str], classes: Sequence[str]) -> None:
    if len(set(classes)) < len(classes):
        raise ValueError(f"a tree needs classes of different names, got {len(classes) - len(set(classes))} twice")
    parents = set(parent_of.values())
    if missing := [name for name in classes if name not in parent_of and len(classes) > 1]:
        raise ValueError(f"{len(missing)} of {len(classes)} classes are missing: {listed(missing)}")
    if inside := [name for name in classes if name in parents]:
        raise ValueError(f"classes are the leaves of the tree, but {listed(inside)} have nodes below them")
    known = set(classes)
    if unknown := [name for name in parent_of if name not in parents and name not in known]:
        raise ValueError(
            f"{len(unknown)} leaves are no classes: {listed(unknown)}; the classes are {listed(list(classes))}"
        )


def _from_below(parent_of: Mapping[str, str], classes: Sequence[str]) -> list[str]:
    """The inner nodes, each before its parent; raise where nodes form a cycle."""
    waiting = dict.fromkeys(parent_of.values(), 0)
    for parent in parent_of.values():
        waiting[parent] += 1
    ready, inner = list(classes), []
    for name in ready:  # grows
        if (parent := parent_of.get(name)) is not None:
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(parent)
                inner.append(parent)
    if left := [name for name in waiting if waiting[name]]:
        name, cycle = left[0], []
        while name not in cycle:
            cycle.append(name)
            name = parent_of[name]
        cycle = cycle[cycle.index(name) :]
        raise ValueError(f"the nodes form a cycle: {' < '.join(map(repr, [*cycle, cycle[0]]))}")
    return inner


def _pairs(file: Path, classes: Sequence[str]) -> list[tuple[str, str]]:
    if file.suffix.lower() == ".json":
        return _of_json(json.loads(file.read_text(encoding="utf-8")), classes)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = [[cell.strip() for cell in row] for row in csv.reader(stream)]
    rows = [row for row in rows if any(row)]
    if not rows:
        raise ValueError(f"expected {FORMS}, got an empty file")
    header, rows = [name.lower() for name in rows[0]], rows[1:]
    if "child" in header and "parent" in header:
        child, parent = header.index("child"), header.index("parent")
        if short := next((row for row in rows if len(row) <= max(child, parent)), None):
            raise ValueError(f"expected a child and a parent in every row, got {','.join(short)!r}")
        # a row without a parent is the root's
        return [(row[child], row[parent]) for row in rows if row[child] and row[parent]]
    if len(header) < 2:
        raise ValueError(f"expected {FORMS}, got the column {header[0]!r} alone")
    paths = [[name for name in row if name] for row in rows]
    # a level that repeats the name above it, as a genus of one species may, is one node
    return [(low, high) for path in paths for high, low in pairwise(path) if low != high]


def _of_json(content: object, classes: Sequence[str]) -> list[tuple[str, str]]:
    if isinstance(content, list):
        if len(content) != len(classes):
            raise ValueError(f"expected a parent for each of the {len(classes)} classes, got {len(content)}")
        return [(name, _inner(parent)) for name, parent in zip(classes, content, strict=True)]
    if not isinstance(content, dict):
        raise ValueError(f"expected {FORMS}, got a JSON {type(content).__name__}")
    return [(str(child), _inner(parent)) for child, parent in content.items() if parent is not None]


def _inner(parent: object) -> str:
    """The name of a node; superclasses may be numbers."""
    return parent if isinstance(parent, str) else f"superclass {parent}"
