"""Prediction sets as nodes of an exported graph: standard operators of fixed shape, thresholds as initialisers.

A set is made in one of two ways. Scores that look at a class by itself (``lac``, ``pas``, ``log_odds``) are compared
with their thresholds, without sorting. Scores that follow the ranking look at the M best classes alone. The penalties
of ``raps``, ``saps`` and ``topk`` bound the size of their sets, which gives M; for ``aps`` it is a limit that the
calibration knew: a class beyond it has an infinite score.

Calibration takes its scores from these nodes as well (:func:`score_model`), so that the threshold is one of the values
that it will be compared with, to the last bit.
"""

import copy
from typing import Any

import numpy as np

from topk_export.errors import ExportError
from topk_export.verification.graph import LOGITS, head_model
from topk_registry.conformal import PredictionSets, Score
from topk_registry.conformal.scores import LogOdds, Pas, Rank, Ranked, Raps, Saps

MARGINALS = "marginals"
SET, SIZE = "set", "set_size"
SCORES, CLASSES = "set_scores", "set_classes"
PREFIX = "sets/"


class Nodes:
    """Adds nodes and constants to a graph, under names of its own."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __call__(self, op: str, *inputs: str, out: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """One node; the name of its output, or a list of their names."""
        from onnx import helper

        first = out or f"{PREFIX}{op}_{len(self._graph.node)}"
        names = [first, *(f"{first}_{i}" for i in range(1, outputs))]
        self._graph.node.append(helper.make_node(op, inputs, names, name=f"{PREFIX}{first}", **attributes))
        return first if outputs == 1 else names

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        from onnx import numpy_helper

        name = PREFIX + name
        self._graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def output(self, name: str, kind: int, shape: list[Any]) -> None:
        from onnx import helper

        self._graph.output.append(helper.make_tensor_value_info(name, kind, shape))


def add_sets(model: Any, sets: PredictionSets, n: int, *, max_size: int) -> Any:
    """A copy of a ModelProto with the outputs ``set`` [B, n] and ``set_size`` [B].

    Args:
        model: as the exporter writes it.
        sets: calibrated on the scores of :func:`score_model`.
        n: number of classes.
        max_size: the most classes that a ranked set looks at.
    """
    from onnx import TensorProto

    model = _without_sets(model)
    add = Nodes(model.graph)
    limits = sets.thresholds
    scores = np.broadcast_to(np.asarray(limits.scores, np.float64), (n,) if np.ndim(limits.scores) else (1,))
    level = _in_graph(sets.score, scores)
    if isinstance(sets.score, Ranked) or limits.max_rank is not None:
        count, full = _ranked_set(add, sets, level, largest_size(sets, n, max_size))
    else:
        count, full = _plain_set(add, sets, level)
    if np.isinf(scores).any() and np.ndim(limits.scores):
        full = add("Or", full, add.constant("always", np.isinf(scores)[None], np.bool_))
        count = None
    add("Identity", full, out=SET)
    if count is None:
        count = add(
            "ReduceSum", add("Cast", full, to=TensorProto.FLOAT), add.constant("row", [1], np.int64), keepdims=0
        )
    add("Cast", count, out=SIZE, to=TensorProto.INT64)
    batch = _batch(model)
    add.output(SET, TensorProto.BOOL, [batch, n])
    add.output(SIZE, TensorProto.INT64, [batch])
    return model


def largest_size(sets: PredictionSets, n: int, max_size: int) -> int:
    """Return the number of best classes that thresholds can let into a set, at most ``max_size``."""
    scores = np.atleast_1d(np.asarray(sets.thresholds.scores))
    finite = np.isfinite(scores)
    if not finite.any():
        return 1
    size = min(n, max_size, sets.score.largest_rank(float(scores[finite].max()), n))
    if isinstance(limit := sets.thresholds.max_rank, np.ndarray):
        size = min(size, int(limit[np.broadcast_to(finite, (n,))].max()))
    return size


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

    model = _without_sets(model)
    add, batch = Nodes(model.graph), _batch(model)
    model.graph.value_info.extend(model.graph.output)  # the head begins at the declared logits
    del model.graph.output[:]
    if max_size is None:
        n = "classes"
        add("Identity", _plain_scores(add, score, temperature), out=SCORES)
    else:
        n = max_size
        scores, classes, _ = _ranked_scores(add, score, temperature, max_size)
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


def _without_sets(model: Any) -> Any:
    """A copy without the nodes, constants and outputs of an earlier calibration."""
    model = copy.deepcopy(model)
    graph = model.graph
    kept = [output for output in graph.output if output.name not in (SET, SIZE)]
    nodes = [node for node in graph.node if not node.name.startswith(PREFIX)]
    constants = [tensor for tensor in graph.initializer if not tensor.name.startswith(PREFIX)]
    for field, items in ((graph.output, kept), (graph.node, nodes), (graph.initializer, constants)):
        del field[:]
        field.extend(items)
    return model


def _batch(model: Any) -> Any:
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    return dim.dim_param or dim.dim_value


def _probabilities(add: Nodes, temperature: float) -> str:
    logits = LOGITS if temperature == 1.0 else add("Div", LOGITS, add.constant("temperature", [temperature]))
    return add("Softmax", logits, axis=-1)


def _values(add: Nodes, score: Score, temperature: float) -> str:
    return MARGINALS if isinstance(score, LogOdds) else _probabilities(add, temperature)


def _one_by_one(add: Nodes, score: Score, values: str, classes: str | None = None) -> str:
    """The score of single classes, from their probability or marginal."""
    if isinstance(score, LogOdds):
        return add("Neg", values)  # the marginal orders classes as its log-odds do, and needs no logarithm
    if isinstance(score, Pas):
        scale = add.constant("scale", score.scale)
        return add("Mul", values, scale if classes is None else add("Gather", scale, classes))
    return add("Sub", add.constant("one", [1.0]), values)


def _plain_scores(add: Nodes, score: Score, temperature: float) -> str:
    return _one_by_one(add, score, _values(add, score, temperature))


def _ranked_scores(add: Nodes, score: Score, temperature: float, size: int) -> tuple[str, str, np.ndarray]:
    """The scores of the best classes [B, M], which they are, and their ranks [1, M]."""
    values = _values(add, score, temperature)
    _, classes = add("TopK", LOGITS, add.constant("size", [size], np.int64), axis=-1, outputs=2)
    best = add("GatherElements", values, classes, axis=1)
    places = np.arange(1, size + 1)[None]
    if not isinstance(score, Ranked):
        return _one_by_one(add, score, best, classes), classes, places
    if isinstance(score, Rank):
        return add("Add", add("Mul", best, add.constant("none", [0.0])), add.constant("ranks", places)), classes, places
    if isinstance(score, Saps):
        first = add(
            "Slice", best, *(add.constant(name, [i], np.int64) for name, i in (("from", 0), ("to", 1), ("axis", 1)))
        )
        others = add("Mul", first, add.constant("others", places > 1))
        return add("Add", others, add.constant("steps", (places - 1) * score.weight)), classes, places
    sums = add("CumSum", best, add.constant("along", 1, np.int64))
    if isinstance(score, Raps):
        penalty = score.penalty * np.maximum(0, places - score.k_reg)
        sums = add("Add", sums, add.constant("penalty", penalty))
    return sums, classes, places


def _ranked_set(add: Nodes, sets: PredictionSets, level: np.ndarray, size: int) -> tuple[str, str]:
    from onnx import TensorProto

    scores, classes, ranks = _ranked_scores(add, sets.score, sets.temperature, size)
    limits = add.constant("thresholds", level)
    inside = add("LessOrEqual", scores, limits if len(level) == 1 else add("Gather", limits, classes))
    if isinstance(sets.thresholds.max_rank, np.ndarray):
        largest = add("Gather", add.constant("largest_ranks", sets.thresholds.max_rank), classes)
        inside = add("And", inside, add("LessOrEqual", add.constant("places", ranks), largest))
    if not sets.allow_empty:
        inside = add("Or", inside, add.constant("first", np.arange(size)[None] == 0, np.bool_))
    members = add("Cast", inside, to=TensorProto.FLOAT)
    count = add("ReduceSum", members, add.constant("rows", [1], np.int64), keepdims=0)
    empty = add("ConstantOfShape", add("Shape", LOGITS), value=_zero())
    return count, add("Cast", add("ScatterElements", empty, classes, members, axis=1), to=TensorProto.BOOL)


def _plain_set(add: Nodes, sets: PredictionSets, level: np.ndarray) -> tuple[str, str]:
    from onnx import TensorProto

    scores = _plain_scores(add, sets.score, sets.temperature)
    limits = add.constant("thresholds", level)
    row = add.constant("rows", [1], np.int64)
    if not sets.allow_empty:
        smallest = add("Neg", add("ReduceMax", add("Neg", scores), row, keepdims=1))
        limits = add("Max", limits, smallest)
    inside = add("LessOrEqual", scores, limits)
    return add("ReduceSum", add("Cast", inside, to=TensorProto.FLOAT), row, keepdims=0), inside


def _in_graph(score: Score, thresholds: np.ndarray) -> np.ndarray:
    """Thresholds in the units that the graph compares: single precision, and marginals for log-odds."""
    if isinstance(score, LogOdds):
        thresholds = -1 / (1 + np.exp(np.clip(thresholds, -700, 700)))
    largest = float(np.finfo(np.float32).max)  # some runtimes fold infinities away
    return np.clip(thresholds, -largest, largest).astype(np.float32)


def _zero() -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.zeros(1, np.float32))


def check_fits(model: Any, score: Score) -> None:
    """Raise unless the file gives what calibration with this score needs."""
    outputs = {output.name for output in model.graph.output}
    needed = {LOGITS, *([MARGINALS] if isinstance(score, LogOdds) else [])}
    if missing := needed - outputs:
        raise ExportError(
            f"calibration with score {score.name} needs the outputs {' and '.join(sorted(needed))}; this file "
            f"gives {', '.join(sorted(outputs))}: export it with --outputs {' '.join(sorted(outputs | missing))}"
        )
