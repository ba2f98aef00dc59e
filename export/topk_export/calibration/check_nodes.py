"""The check of a score's nodes: what they compute in a file is what the score computes on arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np

from topk_export.calibration.graph import SCORES, ranked_scores
from topk_export.calibration.score_nodes import MARGINALS, Nodes, ScoreNodes, nodes_of
from topk_export.verification.graph import LOGITS
from topk_registry.oldsets import Score, create_score

BATCH = 6
OPSET = 18
ALLOWED = 1e-5  # single precision in the file, relative to the largest score


def check_score_nodes(score: str | Score, *, num_classes: int = 10, k: int = 3) -> None:
    """Raise an AssertionError unless the nodes of a score give its scores, in a file that onnxruntime runs.

    Args:
        score: a registered name, or an object.
        num_classes: of the made-up rows.
        k: of the marginals, which a score of log-odds takes.
    """
    built = create_score(score)
    kind = nodes_of(type(built))
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((BATCH, num_classes)).astype(np.float32)
    marginals = rng.dirichlet(np.full(num_classes, 50.0), BATCH).astype(np.float32) * k
    given = {LOGITS: logits, MARGINALS: marginals} if MARGINALS in kind.needs else {LOGITS: logits}
    values = built.inputs(logits.astype(np.float64), 1.0, given.get(MARGINALS))
    wanted = np.asarray(built(values))
    if not built.ranked:
        scores = kind.from_graph(_run(lambda add: _of_classes(kind(add, built)), given, num_classes))
        _compare(scores, wanted, f"{kind.__name__}.of_classes")
    size = max(1, num_classes // 2)
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :size]
    scores = kind.from_graph(_run(lambda add: _of_best(kind(add, built), size), given, size))
    _compare(scores, np.take_along_axis(wanted, best, -1), f"{kind.__name__}.of_best")


def _of_classes(nodes: ScoreNodes) -> str:
    return nodes.of_classes(nodes.values(1.0))


def _of_best(nodes: ScoreNodes, size: int) -> str:
    return ranked_scores(nodes.add, nodes, nodes.values(1.0), size)[0]


def _run(build: Callable[[Nodes], str], given: dict[str, np.ndarray], size: int) -> np.ndarray:
    """The output of nodes that are added to an empty graph."""
    import onnxruntime
    from onnx import TensorProto, helper

    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", x.shape[1]]) for n, x in given.items()]
    graph = helper.make_graph([], "scores", inputs, [])
    add: Any = Nodes(graph)
    add("Identity", build(add), out=SCORES)
    add.output(SCORES, TensorProto.FLOAT, ["batch", size])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (scores,) = session.run([SCORES], given)
    return np.asarray(scores)


def _compare(scores: np.ndarray, wanted: np.ndarray, what: str) -> None:
    if scores.shape != wanted.shape:
        raise AssertionError(f"expected {what} to give {list(wanted.shape)}, got {list(scores.shape)}")
    allowed = ALLOWED * max(1.0, float(np.abs(wanted).max()))
    apart = np.abs(scores - wanted)
    if not (apart <= allowed).all():
        place = np.unravel_index(np.nanargmax(apart), apart.shape)
        raise AssertionError(
            f"expected {what} to give {wanted[place]:.6g}, as the score does, got {scores[place]:.6g} "
            f"(allowed difference {allowed:.1g})"
        )
