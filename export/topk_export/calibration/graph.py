"""Prediction sets as nodes of an exported graph: standard operators of fixed shape, thresholds as initialisers.

A set is made in one of two ways. Scores that look at a class by itself (``lac``, ``pas``, ``log_odds``) are compared
with their thresholds, without sorting. Scores that follow the ranking look at the M best classes alone. The penalties
of ``raps``, ``saps`` and ``topk`` bound the size of their sets, which gives M; for ``aps`` it is a limit that the
calibration knew: a class beyond it has an infinite score. The nodes of each score are in ``score_nodes``.

Calibration takes its scores from these nodes as well (:func:`score_model`), so that the threshold is one of the values
that it will be compared with, to the last bit.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from topk_export.calibration.score_nodes import PREFIX, Nodes, ScoreNodes, TreeNodes, nodes_of
from topk_export.runtime.metadata import GROUP
from topk_export.verification.graph import LOGITS, head_model
from topk_registry.oldsets import PredictionSets, Score, Thresholds

SET, SIZE, LABELS, NODES = "set", "set_size", "labels", "set_nodes"
SCORES, CLASSES = "set_scores", "set_classes"


def add_sets(model: Any, sets: PredictionSets, n: int, *, max_size: int) -> Any:
    """A copy of a ModelProto with the outputs ``set`` [B, n] and ``set_size`` [B].

    Args:
        model: as the exporter writes it.
        sets: calibrated on the scores of :func:`score_model`.
        n: number of classes.
        max_size: the most classes that a ranked set looks at.
    """
    from onnx import TensorProto

    model = without_sets(model)
    add = Nodes(model.graph)
    limits = sets.thresholds
    nodes = nodes_of(type(sets.score))(add, sets.score)
    own = limits.of_groups if limits.groups else np.atleast_1d(np.asarray(limits.scores, np.float64))
    level = _in_graph(nodes, own)
    if limits.groups:
        _group_input(model)
    values = nodes.values(sets.temperature)
    if sets.score.ranked or limits.max_rank is not None:
        count, full = _ranked_set(add, nodes, values, sets, level, largest_size(sets, n, max_size))
    else:
        count, full = _plain_set(add, nodes, values, sets, level)
    count, full = _all_where_broken(add, values, count, full, n)
    always = limits.unlimited(n)
    if always.any():
        full = add("Or", full, add.constant("always", always[None], np.bool_))
        count = None
    elif limits.groups and np.isposinf(own).any():  # groups of too few samples have all classes
        full = add("Or", full, _of_group(add, add.constant("group_always", np.isposinf(own), np.bool_)))
        count = None
    add("Identity", full, out=SET)
    if count is None:
        count = add(
            "ReduceSum", add("Cast", full, to=TensorProto.FLOAT), add.constant("row", [1], np.int64), keepdims=0
        )
    add("Cast", count, out=SIZE, to=TensorProto.INT64)
    batch = batch_of(model)
    add.output(SET, TensorProto.BOOL, [batch, n])
    add.output(SIZE, TensorProto.INT64, [batch])
    if isinstance(nodes, TreeNodes) and (limits.groups or not np.ndim(limits.scores)):
        add("Identity", nodes.set_nodes(SET), out=NODES)
        add.output(NODES, TensorProto.INT64, [batch, nodes.most])
    return model


def largest_size(sets: PredictionSets, n: int, max_size: int) -> int:
    """Return the number of best classes that thresholds can let into a set, at most ``max_size``."""
    limits = sets.thresholds
    if limits.groups:
        finite = [q for q in np.asarray(limits.scores, np.float64) if q < np.inf]
        each = [replace(sets, thresholds=Thresholds(q, limits.max_rank)) for q in finite]
        return max((largest_size(own, n, max_size) for own in each), default=1)
    scores = np.broadcast_to(np.asarray(limits.scores, np.float64), (n,))
    ranks = np.broadcast_to(n if limits.max_rank is None else limits.max_rank, (n,))
    rest = ~limits.unlimited(n)
    bounds = {q: sets.score.largest_rank(float(q), n) for q in np.unique(scores[rest])}
    sizes = [min(bounds[q], rank) for q, rank in zip(scores[rest], ranks[rest], strict=True)]
    return max(1, min(n, max_size, int(max(sizes, default=1))))


def score_model(model: Any, score: Score, *, temperature: float, max_size: int | None) -> Any:
    """The head of a ModelProto with the scores of all classes as its outputs.

    Args:
        model: as the exporter writes it.
        score: the score to compute.
        temperature: divides the logits.
        max_size: None: ``set_scores`` [B, n]. A number M: ``set_scores`` of the M best classes [B, M], and
            ``set_classes`` that they are.
    """
    from onnx import TensorProto

    model = without_sets(model)
    add, batch = Nodes(model.graph), batch_of(model)
    model.graph.value_info.extend(model.graph.output)  # the head begins at the declared logits
    del model.graph.output[:]
    if max_size is None:
        n = "classes"
        nodes = nodes_of(type(score))(add, score)
        add("Identity", nodes.of_classes(nodes.values(temperature)), out=SCORES)
    else:
        n = max_size
        nodes = nodes_of(type(score))(add, score)
        scores, classes, _ = ranked_scores(add, nodes, nodes.values(temperature), max_size)
        add("Identity", scores, out=SCORES)
        add("Identity", classes, out=CLASSES)
        add.output(CLASSES, TensorProto.INT64, [batch, n])
    add.output(SCORES, TensorProto.FLOAT, [batch, n])
    return head_model(model)


def set_model(model: Any) -> Any:
    """The head of a calibrated ModelProto: from logits to its sets."""
    return head_model(model)


def is_calibrated(model: Any) -> bool:
    """True where the file gives sets already."""
    return SET in {output.name for output in model.graph.output}


def without_sets(model: Any) -> Any:
    """A copy of a ModelProto without the nodes, constants and outputs of an earlier calibration."""
    model = copy.deepcopy(model)
    graph = model.graph
    kept = [output for output in graph.output if output.name not in (SET, SIZE, LABELS, NODES)]
    inputs = [value for value in graph.input if value.name != GROUP]
    nodes = [node for node in graph.node if not node.name.startswith(PREFIX)]
    constants = [tensor for tensor in graph.initializer if not tensor.name.startswith(PREFIX) and tensor.name != GROUP]
    fields = ((graph.input, inputs), (graph.output, kept), (graph.node, nodes), (graph.initializer, constants))
    for field, items in fields:
        del field[:]
        field.extend(items)
    return model


def batch_of(model: Any) -> Any:
    """The batch axis of a ModelProto: its name, or its size where that is fixed."""
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    return dim.dim_param or dim.dim_value


def ranked_scores(add: Nodes, nodes: ScoreNodes, values: str, size: int) -> tuple[str, str, np.ndarray]:
    """The scores of the best classes [B, M] from the inputs of the score, which they are, and their ranks [1, M]."""
    _, classes = add("TopK", LOGITS, add.constant("size", [size], np.int64), axis=-1, outputs=2)
    places = np.arange(1, size + 1)[None]
    return nodes.of_best(add("GatherElements", values, classes, axis=1), classes, places), classes, places


def _ranked_set(
    add: Nodes, nodes: ScoreNodes, values: str, sets: PredictionSets, level: np.ndarray, size: int
) -> tuple[str, str]:
    from onnx import TensorProto

    scores, classes, ranks = ranked_scores(add, nodes, values, size)
    limits = add.constant("thresholds", level)
    if sets.thresholds.groups:
        limits = _of_group(add, limits)
    elif len(level) > 1:
        limits = add("Gather", limits, classes)
    inside = add("LessOrEqual", scores, limits)
    limit = sets.thresholds.max_rank
    if limit is not None and np.min(limit) < size:
        largest = add("Gather", add.constant("largest_ranks", limit), classes)
        inside = add("And", inside, add("LessOrEqual", add.constant("places", ranks), largest))
    if not sets.allow_empty:
        inside = add("Or", inside, add.constant("first", np.arange(size)[None] == 0, np.bool_))
    members = add("Cast", inside, to=TensorProto.FLOAT)
    count = add("ReduceSum", members, add.constant("rows", [1], np.int64), keepdims=0)
    empty = add("ConstantOfShape", add("Shape", LOGITS), value=_zero())
    return count, add("Cast", add("ScatterElements", empty, classes, members, axis=1), to=TensorProto.BOOL)


def _plain_set(add: Nodes, nodes: ScoreNodes, values: str, sets: PredictionSets, level: np.ndarray) -> tuple[str, str]:
    from onnx import TensorProto

    scores = nodes.of_classes(values)
    limits = add.constant("thresholds", level)
    if sets.thresholds.groups:
        limits = _of_group(add, limits)
    row = add.constant("rows", [1], np.int64)
    if not sets.allow_empty:
        smallest = add("Neg", add("ReduceMax", add("Neg", scores), row, keepdims=1))
        limits = add("Max", limits, smallest)
    inside = add("LessOrEqual", scores, limits)
    return add("ReduceSum", add("Cast", inside, to=TensorProto.FLOAT), row, keepdims=0), inside


def _all_where_broken(add: Nodes, values: str, count: str, full: str, n: int) -> tuple[str, str]:
    """The sizes [B] and sets [B, n], with all classes for rows with NaN among the inputs of the score."""
    from onnx import TensorProto

    total = add("ReduceSum", values, add.constant("of_row", [1], np.int64), keepdims=1)
    # a comparison with NaN is false; not every runtime has IsNaN
    broken = add("Not", add("LessOrEqual", total, add.constant("largest", [np.finfo(np.float32).max])))
    sizes = add("Mul", add("Cast", broken, to=TensorProto.FLOAT), add.constant("all", [float(n)]))
    sizes = add("Squeeze", sizes, add.constant("of_rows", [1], np.int64))
    return add("Max", count, sizes), add("Or", full, broken)


def _group_input(model: Any) -> None:
    """Add the input ``group`` [groups]: a number for each row, or one for all; by default -1, that of no group."""
    from onnx import TensorProto, helper, numpy_helper

    # an initializer that is an input too is a default: runtimes that feed the images alone go on as before
    model.graph.input.append(helper.make_tensor_value_info(GROUP, TensorProto.INT64, ["groups"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), GROUP))


def _of_group(add: Nodes, table: str) -> str:
    """The entry of each row's group [B, 1] or [1, 1]; -1 is the table's last."""
    key = f"{table.removeprefix(PREFIX)}_column"
    return add("Unsqueeze", add("Gather", table, GROUP), add.constant(key, [1], np.int64))


def _in_graph(nodes: ScoreNodes, thresholds: np.ndarray) -> np.ndarray:
    """Thresholds in the units that the graph compares, in single precision."""
    largest = float(np.finfo(np.float32).max)  # some runtimes fold infinities away
    return np.clip(nodes.in_graph(thresholds), -largest, largest).astype(np.float32)


def _zero() -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.zeros(1, np.float32))
