"""Rows of scores, as Arrow's record batches."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from topk_export.errors import ImageError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import NOT_FINITE, are_numbers, node_names


def import_arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("pyarrow is not installed: pip install 'topk-registry[score]'") from error
    return pyarrow


def folder_of(name: str) -> str:
    """Return the name of the folder that an image lies in, by the path or the URL of the image."""
    return os.path.basename(os.path.dirname(name))


def schema(
    *,
    full: bool,
    about: dict[str, str],
    labels: bool = False,
    several: bool = False,
    added: Mapping[str, str] | None = None,
    nodes: bool = False,
    groups: bool = False,
) -> Any:
    """The columns. Lists are best first; they are null, and ``error`` says why, for an image that has no scores.

    Args:
        full: with the logits and marginals of all classes.
        about: is kept in the file.
        nodes: with the names of the tree's nodes that a set is made of.
        groups: with the group of an image, whose threshold made its set.
        labels: with the class that the folder of an image stands for; null where it stands for none.
        several: of a file of several labels: probabilities in the place of marginals, and the chosen classes.
        added: columns of plug-ins, with Arrow's names of their types.
    """
    pa = import_arrow()
    share = "probability" if several else "marginal"
    columns = [
        ("path", pa.string()),
        ("index", pa.list_(pa.int32())),
        ("class", pa.list_(pa.string())),
        ("logit", pa.list_(pa.float32())),
        (share, pa.list_(pa.float32())),
        ("set", pa.list_(pa.int32())),
        ("set_size", pa.int32()),
        ("error", pa.string()),
    ]
    if nodes:
        columns.insert(-1, ("set_nodes", pa.list_(pa.string())))
    if groups:
        columns.insert(1, ("group", pa.string()))
    if labels:
        columns.insert(1, ("label", pa.int32()))
    if several:
        columns.insert(5, ("labels", pa.list_(pa.int32())))
    if full:
        columns += [(name, pa.list_(pa.float32())) for name in ("logits", "probabilities" if several else "marginals")]
    columns += [(name, pa.type_for_alias(kind)) for name, kind in (added or {}).items()]
    return pa.schema(columns, metadata=about)


class Rows:
    """Makes rows of a model's outputs.

    Args:
        predictor: the model.
        columns: as :func:`schema` gives them.
        top: the number of best classes; None: the file's k.
        max_set: the most classes of a set that are given.
        labels: the class of each folder, where they are wanted.
        added: for each column of a plug-in, the values of the images that have scores, from the model's outputs.
    """

    def __init__(
        self,
        predictor: Predictor,
        columns: Any,
        *,
        top: int | None,
        max_set: int | None,
        labels: Mapping[str, int] | None = None,
        added: Mapping[str, Callable[[Mapping[str, np.ndarray]], list[Any]]] | None = None,
    ) -> None:
        self._arrow = import_arrow()
        self._predictor, self.columns, self._max_set = predictor, columns, max_set
        self._labels, self._added = labels or {}, added or {}
        metadata: Metadata = predictor.metadata
        self._top = min(top or metadata.k, metadata.num_classes)
        self._names = self._arrow.array(metadata.class_names, self._arrow.string())
        self._full = "logits" in columns.names
        self._share = "probability" if metadata.several else "marginal"

    def of(
        self,
        names: Sequence[str],
        inputs: Sequence[np.ndarray | ImageError],
        groups: Sequence[str | None] | None = None,
    ) -> Any:
        """A record batch, one row an image: its scores, or why it has none.

        Args:
            names: of the images.
            inputs: of the model, or what is wrong with the image.
            groups: of the images; None: the predictor's.
        """
        groups = groups or [None] * len(names)
        errors = [str(x) if isinstance(x, ImageError) else None for x in inputs]
        good = [(x, group) for x, group in zip(inputs, groups, strict=True) if not isinstance(x, ImageError)]
        batch = np.stack([x for x, _ in good]) if good else self._predictor.preprocess([])
        told = self._predictor.metadata.group_names and [self._predictor.group_number(group) for _, group in good]
        outputs = self._predictor.run(batch, np.array(told, np.int64)) if told else self._predictor.run(batch)
        fine = are_numbers(outputs)
        for row in np.flatnonzero([error is None for error in errors])[~fine]:
            errors[row] = NOT_FINITE
        missing = np.array([error is not None for error in errors], bool)
        outputs = {name: values[fine] for name, values in outputs.items()}
        cells = {
            "path": self._arrow.array([_text(name) for name in names], self._arrow.string()),
            "label": self._arrow.array([self._labels.get(folder_of(name)) for name in names], self._arrow.int32()),
            "group": self._arrow.array([group and _text(group) for group in groups], self._arrow.string()),
            "error": self._arrow.array([error and _text(error) for error in errors], self._arrow.string()),
            **self._scores(outputs, missing),
            **self._of_plug_ins(outputs, missing),
        }
        return self._arrow.record_batch([cells[name] for name in self.columns.names], schema=self.columns)

    def _scores(self, outputs: dict[str, np.ndarray], missing: np.ndarray) -> dict[str, Any]:
        needed = self._predictor.metadata.needed
        logits, shares = (outputs[name] for name in needed)
        order = np.argsort(-logits, axis=-1, kind="stable")
        top = order[:, : self._top].astype(np.int32)
        each = np.full(len(top), top.shape[1])
        lists = {
            "index": self._lists(top.ravel(), each, missing),
            "class": self._lists(self._names.take(self._arrow.array(top.ravel())), each, missing),
            "logit": self._lists(np.take_along_axis(logits, top, -1).ravel(), each, missing),
            self._share: self._lists(np.take_along_axis(shares, top, -1).ravel(), each, missing),
        }
        if self._full:
            each = np.full(len(top), logits.shape[1])
            lists |= {name: self._lists(outputs[name].ravel(), each, missing) for name in needed}
        if "labels" in self.columns.names:
            lists["labels"] = self._members(outputs.get("labels"), order, missing)
        if (nodes := node_names(outputs, self._predictor.metadata)) is not None and "set_nodes" in self.columns.names:
            flat = self._arrow.array([name for row in nodes for name in row], self._arrow.string())
            lists["set_nodes"] = self._lists(flat, np.array([len(row) for row in nodes], np.int64), missing)
        return lists | self._sets(outputs.get("set"), order, missing)

    def _of_plug_ins(self, outputs: dict[str, np.ndarray], missing: np.ndarray) -> dict[str, Any]:
        cells = {}
        for name, values_of in self._added.items():
            values = iter(values_of(outputs))
            whole = [None if gone else next(values) for gone in missing]
            cells[name] = self._arrow.array(whole, self.columns.field(name).type)
        return cells

    def _sets(self, inside: np.ndarray | None, order: np.ndarray, missing: np.ndarray) -> dict[str, Any]:
        if inside is None:
            kinds = {name: self.columns.field(name).type for name in ("set", "set_size")}
            return {name: self._arrow.nulls(len(missing), kind) for name, kind in kinds.items()}
        members = np.take_along_axis(inside.astype(bool), order, -1)
        sizes = np.zeros(len(missing), np.int32)
        sizes[~missing] = members.sum(-1)
        chosen = self._members(inside, order, missing, most=self._max_set)
        return {"set": chosen, "set_size": self._arrow.array(sizes, mask=missing)}

    def _members(
        self, inside: np.ndarray | None, order: np.ndarray, missing: np.ndarray, *, most: int | None = None
    ) -> Any:
        """The classes of each row that are inside, best first; null where the file has no such output."""
        if inside is None:
            return self._arrow.nulls(len(missing), self._arrow.list_(self._arrow.int32()))
        members = np.take_along_axis(inside.astype(bool), order, -1)
        if most is not None:
            members &= members.cumsum(-1) <= most
        return self._lists(order[members].astype(np.int32), members.sum(-1), missing)

    def _lists(self, values: Any, lengths: np.ndarray, missing: np.ndarray) -> Any:
        """Lists of the given lengths for the rows that are not missing, null for the others."""
        offsets = np.zeros(len(missing) + 1, np.int32)
        offsets[1:][~missing] = lengths
        return self._arrow.ListArray.from_arrays(
            self._arrow.array(offsets.cumsum(dtype=np.int32)),
            self._arrow.array(values) if isinstance(values, np.ndarray) else values,
            mask=self._arrow.array(missing),
        )


def _text(text: str) -> str:
    """Text that UTF-8 can hold: names of files may be any bytes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
