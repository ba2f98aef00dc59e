"""Columns that installed distributions add to the rows of ``topk-registry score``.

A column is an entry point of the group ``topk_registry.columns``: a factory that is called with the metadata of the
model file and returns a :class:`Column`. ``topk-registry score --column NAME`` writes it beside ours.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from topk_export.runtime.metadata import Metadata
from topk_export.runtime.preprocess import Preprocess
from topk_export.scoring.rows import import_arrow, schema
from topk_registry import registry
from topk_registry.registry.errors import BrokenPluginError, PluginError


class Column(Protocol):
    """One value an image, computed from the outputs of the model."""

    @property
    def type(self) -> str:
        """Arrow's name of the type, such as ``"float32"``, ``"int32"``, ``"bool"`` or ``"string"``."""
        ...

    def __call__(self, outputs: Mapping[str, np.ndarray]) -> Sequence[Any] | np.ndarray:
        """The values of N images.

        Args:
            outputs: of the file, by name: ``logits`` and ``marginals`` [N, n], in a file of several labels
                ``probabilities`` instead, and ``set`` [N, n] where it has one.
                Images that cannot be read, and scores that are no numbers, are not among them.
        """
        ...


def opened(names: Sequence[str], metadata: Metadata) -> dict[str, Column]:
    """Build columns by name, and try each on made-up scores, so that a fault is told before an image is read."""
    return {name: _opened(name, metadata) for name in names}


def owners(names: Sequence[str]) -> dict[str, str]:
    """The distribution and version behind each column: another one may compute something else."""
    infos = {name: registry.columns.info(name) for name in names}
    return {name: f"{info.distribution} {info.version}".strip() for name, info in infos.items()}


def values_of(name: str, column: Column, outputs: Mapping[str, np.ndarray]) -> list[Any]:
    """The values of a column as Python's, one a row of the outputs."""
    count = len(outputs["logits"])
    try:
        cells = column(outputs)
        values = cells.tolist() if isinstance(cells, np.ndarray) else list(cells)
    except Exception as error:  # of somebody else's code
        raise BrokenPluginError(f"column {name!r} failed: {type(error).__name__}: {error}") from error
    if len(values) != count:
        raise BrokenPluginError(f"column {name!r} gave {len(values)} values for {count} images")
    return values


def check_column(factory: Callable[..., Column], *, num_classes: int = 10) -> None:
    """Raise an AssertionError unless a factory gives a column that ``topk-registry score`` can write.

    The column is tried on made-up scores: it must give a value an image, of the type that it names, none for no
    images, and the same for an image whatever others are scored with it.
    """
    made = Metadata(
        k=min(5, num_classes - 1),
        temperature=1.0,
        num_classes=num_classes,
        class_names=tuple(f"class {c}" for c in range(num_classes)),
        preprocess=Preprocess((3, 224, 224), (0.5,) * 3, (0.5,) * 3),
    )
    try:
        column = factory(made)
        outputs = _example(made, 6)
        values = _tried("the column", column, outputs)
        alone = [_tried("the column", column, {key: each[[i]] for key, each in outputs.items()})[0] for i in range(6)]
    except PluginError as error:
        raise AssertionError(str(error)) from error
    if values != alone:
        raise AssertionError(f"expected the same value for an image alone and among others, got {alone} and {values}")


def _opened(name: str, metadata: Metadata) -> Column:
    if name in schema(full=True, labels=True, nodes=True, groups=True, several=metadata.several, about={}).names:
        raise ValueError(f"{name!r} is a column of every file of scores: ask for another")
    column = registry.columns.create(name, metadata=metadata)
    _tried(name, column, _example(metadata, 2))
    return column


def _tried(name: str, column: Any, outputs: Mapping[str, np.ndarray]) -> list[Any]:
    pa = import_arrow()
    try:
        kind = pa.type_for_alias(column.type)
    except (AttributeError, TypeError, ValueError) as error:
        got = getattr(column, "type", None)
        raise BrokenPluginError(
            f"column {name!r} must have an attribute type that is Arrow's name of one, such as 'float32', got {got!r}"
        ) from error
    values_of(name, column, {key: values[:0] for key, values in outputs.items()})
    values = values_of(name, column, outputs)
    try:
        return pa.array(values, kind).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise BrokenPluginError(f"column {name!r} gave what is no {column.type}: {error}") from error


def _example(metadata: Metadata, count: int) -> dict[str, np.ndarray]:
    n, k = metadata.num_classes, metadata.k
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((count, n)).astype(np.float32)
    marginals = rng.dirichlet(np.full(n, 50.0), count).astype(np.float32) * k
    outputs = {"logits": logits, metadata.needed[1]: marginals.clip(max=1.0)}
    return outputs | ({} if metadata.sets is None else {"set": logits >= logits.max(-1, keepdims=True)})
