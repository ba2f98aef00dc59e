"""Several labels as nodes of an exported graph: probabilities compared with thresholds, which are initialisers."""

from typing import Any

import numpy as np

from topk_export.calibration.graph import LABELS, SET, SIZE, batch_of, without_sets
from topk_export.calibration.score_nodes import Nodes
from topk_export.verification.reference import NEVER

PROBABILITIES = "probabilities"


def add_labels(model: Any, thresholds: np.ndarray, common: float) -> Any:
    """A copy of a ModelProto with the outputs ``labels`` [B, n], ``set`` [B, n] and ``set_size`` [B].

    Args:
        model: as the exporter writes it, of several labels.
        thresholds: the smallest probability with which each class is chosen [n].
        common: the smallest probability of a class in the set.
    """
    from onnx import TensorProto

    model = without_sets(model)
    add, n, batch = Nodes(model.graph), len(thresholds), batch_of(model)
    limit = np.clip(common, -NEVER, NEVER)
    add("GreaterOrEqual", PROBABILITIES, add.constant("class_thresholds", thresholds[None]), out=LABELS)
    add("GreaterOrEqual", PROBABILITIES, add.constant("threshold", [limit]), out=SET)
    members = add("Cast", SET, to=TensorProto.FLOAT)
    count = add("ReduceSum", members, add.constant("row", [1], np.int64), keepdims=0)
    add("Cast", count, out=SIZE, to=TensorProto.INT64)
    add.output(LABELS, TensorProto.BOOL, [batch, n])
    add.output(SET, TensorProto.BOOL, [batch, n])
    add.output(SIZE, TensorProto.INT64, [batch])
    return model
