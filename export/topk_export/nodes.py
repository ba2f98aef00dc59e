"""ONNX nodes that compute prediction sets from the logits of an exported model.

A prediction set is a set of classes that contains the true class with probability 1 - alpha or more. A calibration
stores thresholds in the file for several values of alpha, which are called levels. At each level, the file has one
threshold for all classes, or one threshold per class.

For each class, the nodes compute a nonconformity score, which is small if the class fits the image. The input ``alpha``
of the model selects a level: the largest level that is not above ``alpha``. The set contains each class with a score of
at most the threshold of this level. The set always contains the class with the largest probability.

If ``alpha`` is not between the smallest and the largest level, the set contains all classes. The set also contains all
classes if a probability of the image is NaN. If the model has an input ``allowed``, classes that are not allowed are
removed from the set.

The calibration computes the scores of labeled images with the same nodes (:func:`score_model`). Therefore these scores
have the same rounding errors as the scores that the exported model computes. All nodes are standard ONNX operators.
"""

import copy
import hashlib
from typing import Any

import numpy as np

from topk_export.graph import optional_input, value_shape
from topk_export.runtime.metadata import ALLOWED, ALPHA, ALPHAS, LOGITS, THRESHOLDS
from topk_registry.conformal import PredictionSets, Score
from topk_registry.conformal.scores import MAX_RANK

PREFIX = "sets/"
SET, SIZE, SCORES = "set", "set_size", "set_scores"
LARGEST = float(np.finfo(np.float32).max)  # stands for infinity: some runtimes optimize operations with infinity away


class Nodes:
    """Builder that appends nodes, constants and outputs to an ONNX graph (a GraphProto).

    The name of each node starts with ``PREFIX``, so that :func:`without_sets` can find and remove the nodes.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __call__(self, op: str, *inputs: str, out: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Append a node of the ONNX operator ``op`` with the input tensors ``inputs``. Return the name of the output.

        If ``outputs`` is above 1, return a list of ``outputs`` names. ``out`` is the name of the first output. By
        default, the method generates a name.
        """
        from onnx import helper

        first = out or f"{PREFIX}{op}_{len(self._graph.node)}"
        names = [first, *(f"{first}_{i}" for i in range(1, outputs))]
        self._graph.node.append(helper.make_node(op, inputs, names, name=f"{PREFIX}{first}", **attributes))
        return first if outputs == 1 else names

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        """Append a constant (an ONNX initializer), and return its name.

        The name is ``PREFIX`` + ``name``. The constants ``set_alphas`` and ``set_thresholds`` get no prefix, because
        other modules read them by these names.
        """
        from onnx import numpy_helper

        name = name if name in (ALPHAS, THRESHOLDS) else PREFIX + name
        self._graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def output(self, name: str, kind: int, shape: list[Any]) -> None:
        from onnx import helper

        self._graph.output.append(helper.make_tensor_value_info(name, kind, shape))


def add_sets(model: Any, sets: PredictionSets) -> Any:
    """Return a copy of an exported model (a ModelProto) that also computes prediction sets.

    The copy has the new outputs ``set``, bool [B, n], and ``set_size``, int64 [B]. The copy also has the optional input
    ``alpha``, float32 [1]. The default of ``alpha`` is ``sets.alpha``. If ``model`` already computes prediction sets,
    the copy computes the new sets instead.
    """
    from onnx import TensorProto

    model = without_sets(model)
    batch, n = value_shape(model.graph, LOGITS)
    add = Nodes(model.graph)
    optional_input(model, ALPHA, np.asarray([sets.alpha], np.float32), ["levels"])
    scores, broken = _add_scores(add, sets.score, sets.temperature, int(n))
    one = add.constant("one", [1], np.int64)
    level = add("Unsqueeze", ALPHA, one)
    # the index of the level is the number of levels up to alpha, minus 1
    reached = add("GreaterOrEqual", level, add.constant(ALPHAS, sets.levels))
    index = add("ReduceSum", add("Cast", reached, to=TensorProto.FLOAT), one, keepdims=0)
    index = add("Max", add("Sub", index, add.constant("unity", 1.0)), add.constant("zero", 0.0))
    limits = add("Gather", add.constant(THRESHOLDS, _stored(sets.table)), add("Cast", index, to=TensorProto.INT64))
    above_first = add("GreaterOrEqual", level, add.constant("first", sets.levels[0]))  # false for NaN
    within = add("And", above_first, add("LessOrEqual", level, add.constant("last", sets.levels[-1])))
    inside = add("Or", add("LessOrEqual", scores, limits), add("Or", broken, add("Not", within)))
    if ALLOWED in {value.name for value in model.graph.input}:
        inside = add("And", inside, ALLOWED)
    add("Identity", inside, out=SET)
    size = add("ReduceSum", add("Cast", SET, to=TensorProto.FLOAT), one, keepdims=0)
    add("Cast", size, out=SIZE, to=TensorProto.INT64)
    add.output(SET, TensorProto.BOOL, [batch, n])
    add.output(SIZE, TensorProto.INT64, [batch])
    return model


def score_model(model: Any, score: Score, temperature: float) -> Any:
    """Return an ONNX model (a ModelProto) that computes nonconformity scores [B, n] from ``logits`` [B, n].

    A nonconformity score is small if the class fits the image. A prediction set consists of the classes with scores of
    at most a threshold. The class with the largest probability gets the score -``LARGEST``, so that every set contains
    this class. If a probability of a row is NaN, all scores of the row are NaN.

    The new model has as many classes as the exported ModelProto ``model``, and the same operator set. The new model
    divides the logits by ``temperature`` before the softmax.
    """
    from onnx import TensorProto, helper

    n = value_shape(model.graph, LOGITS)[1]
    logits = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["batch", n])
    graph = helper.make_graph([], "scores", [logits], [])
    add = Nodes(graph)
    scores, broken = _add_scores(add, score, temperature, int(n))
    add("Where", broken, add.constant("nan", [np.nan]), scores, out=SCORES)
    add.output(SCORES, TensorProto.FLOAT, ["batch", n])
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def without_sets(model: Any) -> Any:
    """Return a copy of a ModelProto without the nodes, constants, inputs and outputs that :func:`add_sets` added."""
    model = copy.deepcopy(model)
    graph = model.graph
    kept = {
        "node": [node for node in graph.node if not node.name.startswith(PREFIX)],
        "initializer": [
            t for t in graph.initializer if not t.name.startswith((PREFIX, ALPHAS, THRESHOLDS)) and t.name != ALPHA
        ],
        "input": [value for value in graph.input if value.name != ALPHA],
        "output": [value for value in graph.output if value.name not in (SET, SIZE)],
    }
    for name, items in kept.items():
        field = getattr(graph, name)
        del field[:]
        field.extend(items)
    return model


def digest_of_table(sets: PredictionSets) -> str:
    """Return the SHA-256 of the thresholds of ``sets``, in the float32 format of the ONNX file."""
    return hashlib.sha256(_stored(sets.table).tobytes()).hexdigest()


def _add_scores(add: Nodes, score: Score, temperature: float, n: int) -> tuple[str, str]:
    """Append nodes for the scores [B, n] and for a mask [B, 1] of rows that contain NaN. Return both tensor names."""
    scaled = LOGITS if temperature == 1 else add("Div", LOGITS, add.constant("temperature", [temperature]))
    p = add("Softmax", scaled, axis=-1)
    total = add("ReduceSum", p, add.constant("row", [1], np.int64), keepdims=1)
    # not every runtime implements IsNaN, but a comparison with NaN is always false
    broken = add("Not", add("LessOrEqual", total, add.constant("largest", [LARGEST])))
    if score.name == "lac":
        scores = add("Sub", add.constant("certain", [1.0]), p)
    else:
        size = min(n, MAX_RANK)
        ordered, classes = add("TopK", p, add.constant("ranks", [size], np.int64), axis=-1, outputs=2)
        ordered = add("CumSum", ordered, add.constant("axis", 1, np.int64))
        ordered = add("Add", ordered, add.constant("penalty", score.rank_penalty(size)[None]))
        empty = add("Expand", add.constant("infinite", [[LARGEST]]), add("Shape", LOGITS))
        scores = add("ScatterElements", empty, classes, ordered, axis=1)
    best = add("ArgMax", p, axis=1, keepdims=1)
    is_best = add("Equal", add.constant("classes", np.arange(n)[None], np.int64), best)
    return add("Where", is_best, add.constant("lowest", [-LARGEST]), scores), broken


def _stored(table: np.ndarray) -> np.ndarray:
    return np.clip(table, -LARGEST, LARGEST).astype("<f4")
