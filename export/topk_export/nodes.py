"""ONNX nodes that compute prediction sets from the logits of an exported model.

A prediction set is a set of classes that contains the true class with probability 1 - alpha or more. A calibration
stores thresholds in the file for several values of alpha, which are called levels. At each level, the file has one
threshold for all classes, or one threshold per class.

For each class, the nodes compute a nonconformity score, which is small if the class fits the image. The input ``alpha``
of the model selects a level: the largest level that is not above ``alpha``. The set contains each class with a score of
at most the threshold of this level. The set always contains the class with the largest probability.

If ``alpha`` is not between the smallest and the largest level, the set contains all classes. The set also contains all
classes if a probability of the image is NaN. If the model has an input ``allowed``, classes that are not allowed are
removed from the set, and the set always contains the allowed class with the largest probability.

The calibration computes the scores of labeled images with the same nodes (:func:`score_model`). Therefore these scores
have the same rounding errors as the scores that the exported model computes. All nodes are standard ONNX operators.
"""

import hashlib
from typing import Any

import numpy as np

from topk_export.graph import PREFIX as OF_HEAD
from topk_export.graph import Nodes, optional_input, value_shape, without_nodes
from topk_export.runtime.metadata import ALLOWED, ALPHA, ALPHAS, LOGITS, THRESHOLDS
from topk_registry.conformal import PredictionSets, Score
from topk_registry.conformal.scores import MAX_RANK

PREFIX = f"{OF_HEAD}sets/"  # of the names of the nodes that this module adds
SET, SIZE, SCORES = "set", "set_size", "set_scores"
LARGEST = float(np.finfo(np.float32).max)  # stands for infinity: some runtimes optimize operations with infinity away


def add_sets(model: Any, sets: PredictionSets) -> Any:
    """Return a copy of an exported model (a ModelProto) that also computes prediction sets.

    The copy has the new outputs ``set``, bool [B, n], and ``set_size``, int64 [B]. The copy also has the optional input
    ``alpha``, float32 [1]. The default of ``alpha`` is ``sets.alpha``. If ``model`` already computes prediction sets,
    the copy computes the new sets instead.
    """
    from onnx import TensorProto

    model = without_nodes(model, PREFIX)
    batch, n = value_shape(model.graph, LOGITS)
    add = Nodes(model, PREFIX)
    optional_input(model, ALPHA, np.asarray([sets.alpha], np.float32), ["levels"])
    lists = ALLOWED in {value.name for value in model.graph.input}
    scores, sound = _add_scores(add, sets.score, sets.temperature, int(n), lists=lists)
    level = add("Unsqueeze", ALPHA, [1])
    # the index of the level is the number of levels up to alpha, minus 1
    reached = add("GreaterOrEqual", level, add.constant(np.asarray(sets.levels, np.float32), ALPHAS))
    index = add("ReduceSum", add("Cast", reached, to=TensorProto.FLOAT), [1], keepdims=0)
    index = add("Max", add("Sub", index, 1.0), 0.0)
    table = add.constant(_stored(sets.table), THRESHOLDS)
    limits = add("Gather", table, add("Cast", index, to=TensorProto.INT64), axis=0)
    above_first = add("GreaterOrEqual", level, float(sets.levels[0]))  # false for NaN
    within = add("And", above_first, add("LessOrEqual", level, float(sets.levels[-1])))
    outside = add("And", add("Not", add("LessOrEqual", scores, limits)), add("And", sound, within))
    if lists:
        add("And", add("Not", outside), ALLOWED, out=SET)
    else:
        add("Not", outside, out=SET)
    size = add("ReduceSum", add("Cast", SET, to=TensorProto.FLOAT), [1], keepdims=0)
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
    scoring = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    add = Nodes(scoring, PREFIX)
    scores, sound = _add_scores(add, score, temperature, int(n))
    add("Where", sound, scores, [np.nan], out=SCORES)
    add.output(SCORES, TensorProto.FLOAT, ["batch", n])
    return scoring


def digest_of_table(sets: PredictionSets) -> dict[str, Any]:
    """Return the SHA-256 and the length of the thresholds of ``sets`` in the ONNX file, as entries of the metadata."""
    content = _stored(sets.table).tobytes()
    return {"thresholds_sha256": hashlib.sha256(content).hexdigest(), "thresholds_bytes": len(content)}


def _add_scores(add: Nodes, score: Score, temperature: float, n: int, lists: bool = False) -> tuple[str, str]:
    """Append nodes for the scores [B, n] and for a mask [B, 1] of rows without NaN. Return both tensor names."""
    scaled = LOGITS if temperature == 1 else add("Div", LOGITS, [float(temperature)])
    p = add("Softmax", scaled, axis=-1)
    total = add("ReduceSum", p, [1], keepdims=1)
    # not every runtime implements IsNaN, but a comparison with NaN is always false
    sound = add("LessOrEqual", total, [LARGEST])
    if score.name == "lac":  # -log p, with LARGEST in place of infinity
        shifted = add("Sub", scaled, add.reduce("ReduceMax", scaled, 1))
        log_total = add("Log", add("ReduceSum", add("Exp", shifted), [1], keepdims=1))
        scores = add("Min", add("Sub", log_total, shifted), [LARGEST])
    else:
        size = min(n, MAX_RANK)
        ordered, classes = add("TopK", p, [size], axis=-1, outputs=2)
        ordered = add("CumSum", ordered, np.int64(1))
        ordered = add("Add", ordered, np.asarray(score.rank_penalty(size)[None], np.float32))
        empty = add("Expand", [[LARGEST]], add("Shape", LOGITS))
        scores = add("ScatterElements", empty, classes, ordered, axis=1)
    # of the logits: the probabilities of all allowed classes may round to 0
    ranked = LOGITS
    if lists:  # a logit of -inf is above those of classes outside of the list
        ranked = add("Where", ALLOWED, add("Max", LOGITS, [-LARGEST / 2]), [-LARGEST])
    best = add("ArgMax", ranked, axis=1, keepdims=1)
    is_best = add("Equal", np.arange(n)[None], best)
    return add("Where", is_best, [-LARGEST], scores), sound


def _stored(table: np.ndarray) -> np.ndarray:
    return np.clip(table, -LARGEST, LARGEST).astype("<f4")
