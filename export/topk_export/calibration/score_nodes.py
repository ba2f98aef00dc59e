"""Scores as nodes of a graph: one class for each score, found by registration or as an entry point of its name.

A score that has none is an error that names this file, never another score: ``SCORES`` of
:mod:`topk_registry.conformal` is the list that :data:`NODES` has to follow, and a test compares the two.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from topk_export.calibration.plan import Plan
from topk_export.errors import ExportError
from topk_export.runtime.metadata import Metadata
from topk_export.verification.graph import LOGITS
from topk_registry import registry
from topk_registry.conformal import Score, create_score, log_odds
from topk_registry.conformal.scores import Aps, Lac, LogOdds, Pas, Rank, Raps, Saps, score_kind
from topk_registry.registry.errors import BrokenPluginError

MARGINALS = "marginals"
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


class ScoreNodes:
    """The nodes of a score, and what a file's calibration needs besides.

    Args:
        add: adds nodes to the graph; None where none are added.
        score: to compute, with its options.
    """

    needs: ClassVar[frozenset[str]] = frozenset({LOGITS})  # outputs of the file
    takes_temperature: ClassVar[bool] = True

    def __init__(self, add: Nodes, score: Any) -> None:
        self.add, self.score = add, score

    def values(self, temperature: float) -> str:
        """The inputs of the score [B, n]."""
        add = self.add
        logits = LOGITS if temperature == 1.0 else add("Div", LOGITS, add.constant("temperature", [temperature]))
        return add("Softmax", logits, axis=-1)

    def of_classes(self, values: str, classes: str | None = None) -> str:
        """The scores of classes in no order [B, n], or of the given ones [B, M]."""
        raise NotImplementedError

    def of_best(self, best: str, classes: str, places: np.ndarray) -> str:
        """The scores of the best classes [B, M] from their inputs, which they are, and their ranks [1, M]."""
        return self.of_classes(best, classes)

    @staticmethod
    def in_graph(scores: np.ndarray) -> np.ndarray:
        """Scores in the units of the nodes."""
        return scores

    @staticmethod
    def from_graph(scores: np.ndarray) -> np.ndarray:
        """Scores of the nodes in the units of their definition."""
        return scores

    @classmethod
    def create(cls, plan: Plan, metadata: Metadata, labels: np.ndarray) -> Score:
        """The score of a plan, for a file and the labels of the samples that tune."""
        return create_score(plan.score, **plan.score_options)


NODES: dict[type[Score], type[ScoreNodes]] = {}


def nodes_for(kind: type[Score]) -> Callable[[type[ScoreNodes]], type[ScoreNodes]]:
    """Register the nodes of a score: of this class, not of its subclasses, which compute something else."""

    def register(nodes: type[ScoreNodes]) -> type[ScoreNodes]:
        if kind in NODES:
            raise ValueError(f"score {kind.name} has the nodes {NODES[kind].__name__} already")
        NODES[kind] = nodes
        return nodes

    return register


def nodes_of(kind: type[Score]) -> type[ScoreNodes]:
    """The nodes of a score: registered here, or of the entry point of its name; raise where nobody wrote them."""
    if kind not in NODES and kind.name in registry.score_nodes:
        NODES[kind] = _of_plug_in(kind.name)
    if kind not in NODES:
        raise ExportError(
            f"score {kind.name} ({kind.__module__}.{kind.__qualname__}) has no nodes, so it cannot be written into a "
            f"file; {', '.join(known.name for known in NODES)} have. To add them, register a class of {__name__} with "
            f"@nodes_for({kind.__name__}), or name it as an entry point {kind.name!r} of {registry.score_nodes.group}"
        )
    return NODES[kind]


def _of_plug_in(name: str) -> type[ScoreNodes]:
    nodes = registry.score_nodes.builder(name)
    if not (isinstance(nodes, type) and issubclass(nodes, ScoreNodes)):
        raise BrokenPluginError(f"{registry.score_nodes.describe(name)} is no subclass of {__name__}.ScoreNodes")
    return nodes


def check_fits(model: Any, plan: Plan) -> None:
    """Raise unless a ModelProto has what calibration by this plan needs."""
    kind, outputs = score_kind(plan.score), {output.name for output in model.graph.output}
    if plan.temperature != 1.0 and not nodes_of(kind).takes_temperature:
        given = "fit" if plan.temperature is None else plan.temperature
        raise ExportError(f"score {kind.name} takes the marginals of the file, at its own temperature, got {given!r}")
    needed = nodes_of(kind).needs
    if missing := needed - outputs:
        raise ExportError(
            f"calibration with score {kind.name} needs the outputs {' and '.join(sorted(needed))}; this file "
            f"gives {', '.join(sorted(outputs))}: export it with --outputs {' '.join(sorted(outputs | missing))}"
        )


@nodes_for(Lac)
class LacNodes(ScoreNodes):
    def of_classes(self, values: str, classes: str | None = None) -> str:
        return self.add("Sub", self.add.constant("one", [1.0]), values)


@nodes_for(Pas)
class PasNodes(ScoreNodes):
    def of_classes(self, values: str, classes: str | None = None) -> str:
        scale = self.add.constant("scale", self.score.scale)
        return self.add("Mul", values, scale if classes is None else self.add("Gather", scale, classes))

    @classmethod
    def create(cls, plan: Plan, metadata: Metadata, labels: np.ndarray) -> Score:
        # add-one smoothing: a class that the tuning part lacks has a prior all the same
        counts = np.bincount(labels, minlength=metadata.num_classes) + 1.0
        return create_score(plan.score, prior=tuple(counts / counts.sum()), **plan.score_options)


@nodes_for(LogOdds)
class LogOddsNodes(ScoreNodes):
    """The marginal orders classes as its log-odds do, and needs no logarithm."""

    needs = frozenset({LOGITS, MARGINALS})
    takes_temperature = False

    def values(self, temperature: float) -> str:
        return MARGINALS

    def of_classes(self, values: str, classes: str | None = None) -> str:
        return self.add("Neg", values)

    @staticmethod
    def in_graph(scores: np.ndarray) -> np.ndarray:
        return -1 / (1 + np.exp(np.clip(scores, -700, 700)))

    @staticmethod
    def from_graph(scores: np.ndarray) -> np.ndarray:
        return np.where(np.isinf(scores), scores, -log_odds(np.clip(-scores, 0, 1)))

    @classmethod
    def create(cls, plan: Plan, metadata: Metadata, labels: np.ndarray) -> Score:
        score = create_score(plan.score, **{"k": metadata.k, **plan.score_options})
        if score.options()["k"] != metadata.k:
            raise ExportError(f"the file's marginals are of k = {metadata.k}, got k = {score.options()['k']}")
        return score


@nodes_for(Rank)
class RankNodes(ScoreNodes):
    def of_best(self, best: str, classes: str, places: np.ndarray) -> str:
        add = self.add
        return add("Add", add("Mul", best, add.constant("none", [0.0])), add.constant("ranks", places))


@nodes_for(Aps)
class ApsNodes(ScoreNodes):
    def of_best(self, best: str, classes: str, places: np.ndarray) -> str:
        return self.add("CumSum", best, self.add.constant("along", 1, np.int64))


@nodes_for(Raps)
class RapsNodes(ApsNodes):
    def of_best(self, best: str, classes: str, places: np.ndarray) -> str:
        penalty = self.score.penalty * np.maximum(0, places - self.score.k_reg)
        return self.add("Add", super().of_best(best, classes, places), self.add.constant("penalty", penalty))


@nodes_for(Saps)
class SapsNodes(ScoreNodes):
    def of_best(self, best: str, classes: str, places: np.ndarray) -> str:
        add = self.add
        slices = (add.constant(name, [i], np.int64) for name, i in (("from", 0), ("to", 1), ("axis", 1)))
        others = add("Mul", add("Slice", best, *slices), add.constant("others", places > 1))
        return add("Add", others, add.constant("steps", (places - 1) * self.score.weight))
