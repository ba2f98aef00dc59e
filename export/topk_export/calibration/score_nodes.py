"""Scores as nodes of a graph: one class for each score, found by registration or as an entry point of its name.

A score that has none is an error that names this file, never another score: ``SCORES`` of
:mod:`topk_registry.oldsets` is the list that :data:`NODES` has to follow, and a test compares the two.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from topk_export.calibration.plan import Plan
from topk_export.errors import ExportError
from topk_export.runtime.metadata import Metadata
from topk_export.verification.graph import LOGITS
from topk_registry import registry
from topk_registry.oldsets import Score, Tree, create_score, log_odds
from topk_registry.oldsets.scores import Aps, Lac, LogOdds, Pas, Rank, Raps, Saps, score_kind
from topk_registry.oldsets.tree import tree_table
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


Kind = TypeVar("Kind", bound=type[ScoreNodes])


def nodes_for(kind: type[Score]) -> Callable[[Kind], Kind]:
    """Register the nodes of a score: of this class, not of its subclasses, which compute something else."""

    def register(nodes: Kind) -> Kind:
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


@nodes_for(Tree)
class TreeNodes(ScoreNodes):
    """Paths of the best classes are looked up, and probabilities outside are sums of masked rows: no MatMul.

    A product of probabilities with the tree's membership matrix would say the same, where GPUs round it to ten bits and
    quantisation to eight. It is not faster either, and the matrix of 10,000 classes and 1201 nodes has 48 MB.
    """

    def __init__(self, add: Nodes, score: Any) -> None:
        super().__init__(add, score)
        self._known: tuple[str, str, str] | None = None
        self._values = ""

    def values(self, temperature: float) -> str:
        self._values = super().values(temperature)
        return self._values

    @classmethod
    def create(cls, plan: Plan, metadata: Metadata, labels: np.ndarray) -> Score:
        if plan.tree is None:
            raise ExportError("score tree needs the tree of the classes: pass --tree FILE")
        return create_score(plan.score, parents=plan.tree.parents, **plan.score_options)

    def of_classes(self, values: str, classes: str | None = None) -> str:
        from onnx import TensorProto

        add, count = self.add, self.most * self._levels
        _, times, own = self._times()
        one, two = (add.constant(f"tree_axis_{i}", [i], np.int64) for i in (1, 2))
        if self.most > 1:  # the nodes around one class are in order already, the largest first
            own, _ = add("TopK", own, add.constant("tree_nodes", [count], np.int64), axis=-1, outputs=2)
        later = add("Not", add("Less", add("Unsqueeze", times, one), add("Unsqueeze", own, two)))  # [B, K, n]
        later = add("Cast", later, to=TensorProto.FLOAT)
        before = add("Neg", add("ReduceSum", add("Mul", later, add("Unsqueeze", values, one)), two, keepdims=0))
        # the largest of all nodes that are no larger: rounding must not undo the order of the sets
        smaller = add.constant("tree_smaller", np.tri(count, dtype=bool).T[None], np.bool_)
        before = self._pick(smaller, add("Unsqueeze", before, one), add.constant("tree_none", [-2.0]))
        before = add("ReduceMax", before, two, keepdims=0)
        # the nodes that come after a class are the first ones, so their number is the place of its own
        number = add("Sub", add.constant("tree_count", [float(count)]), add("ReduceSum", later, one, keepdims=0))
        return add("GatherElements", before, add("Cast", number, to=TensorProto.INT64), axis=1)

    def of_best(self, best: str, classes: str, places: np.ndarray) -> str:
        # the score of a class depends on all others of its row
        return self.add("GatherElements", self.of_classes(self._values), classes, axis=1)

    def set_nodes(self, inside: str) -> str:
        """The nodes of sets [B, m], int64; see :meth:`topk_registry.oldsets.Tree.nodes_of`."""
        from onnx import TensorProto

        add = self.add
        mine, times, own = self._times()  # [B, m, D], [B, n], [B, K]
        one, two, three = (add.constant(f"tree_node_axis_{i}", [i], np.int64) for i in (1, 2, 3))
        none = add.constant("tree_no_node", [-1.0])
        last = add("ReduceMax", self._pick(inside, times, none), one, keepdims=1)  # [B, 1]
        come = add("Not", add("Greater", own, last))
        shape = add.constant("tree_paths", [0, self.most, -1], np.int64)
        nodes = self._pick(add("Reshape", come, shape), mine, none)
        nodes = add("ReduceMax", nodes, two, keepdims=0)  # [B, m]
        if self.most > 1:
            rows, others = add("Unsqueeze", nodes, two), add("Unsqueeze", nodes, one)  # [B, m, 1], [B, 1, m]
            held = add("Equal", add("Unsqueeze", mine, two), add("Unsqueeze", others, three))  # [B, m, m, D]
            held = add("ReduceMax", add("Cast", held, to=TensorProto.FLOAT), three, keepdims=0)
            first = np.tril(np.ones((self.most, self.most), bool), -1)[None]
            same = add("And", add("Equal", rows, others), add.constant("tree_first", first, np.bool_))
            over = add("Cast", add("Or", add("Less", rows, others), same), to=TensorProto.FLOAT)
            drop = add("ReduceMax", add("Mul", held, over), two, keepdims=0)
            nodes = self._pick(add("Greater", drop, add.constant("tree_half", [0.5])), none, nodes)
        return add("Cast", nodes, to=TensorProto.INT64)

    def _pick(self, mask: str, this: str, other: str) -> str:
        """Where the mask holds this, elsewhere the other, exactly: both are finite. Not every runtime has Where."""
        from onnx import TensorProto

        add = self.add
        here, there = (add("Cast", which, to=TensorProto.FLOAT) for which in (mask, add("Not", mask)))
        return add("Add", add("Mul", here, this), add("Mul", there, other))

    @property
    def most(self) -> int:
        return self.score.most(self._classes)

    @property
    def _classes(self) -> int:
        return len(self.score.parents) - len(set(self.score.parents) - {-1})

    def _times(self) -> tuple[str, str, str]:
        """The nodes around the best classes [B, m, D], and the times of classes [B, n] and of these nodes [B, m D]."""
        self._known = self._known or self._make_times()
        return self._known

    def _make_times(self) -> tuple[str, str, str]:
        if not self.score.parents:
            raise ExportError("score tree is written into a file with the parents of its nodes, got none")
        from onnx import TensorProto

        add, most = self.add, self.most
        table = tree_table(self.score.parents, self._classes)
        one, two = (add.constant(f"tree_along_{i}", [i], np.int64) for i in (1, 2))
        _, best = add("TopK", LOGITS, add.constant("tree_most", [most], np.int64), axis=-1, outputs=2)  # [B, m]
        # numbers of nodes as floats, which every runtime compares; they are exact up to 16 million
        levels = add.constant("tree_levels", table.above.T)  # [D, n]
        mine = add("Transpose", add("Gather", levels, best, axis=1), perm=[1, 2, 0])  # [B, m, D]
        turns = np.arange(most, dtype=np.float32) / np.float32(most)
        own = add("Gather", add.constant("tree_sizes", table.sizes), best)
        alone = add("Equal", own, add.constant("tree_one", [1.0]))
        own = self._pick(alone, add.constant("tree_turns", turns[None, :, None]), own)
        # two paths are one as far as the last node that has both classes, and the root is on every path
        here = add("Equal", add("Unsqueeze", mine, add.constant("tree_last", [3], np.int64)), levels)  # [B, m, D, n]
        here = add("Cast", here, to=TensorProto.FLOAT)
        shared = add("Sub", add("ReduceSum", here, two, keepdims=0), add.constant("tree_root", [1.0]))  # [B, m, n]
        times = add("GatherElements", own, add("Cast", shared, to=TensorProto.INT64), axis=2)
        if most > 1:
            times = add("Neg", add("ReduceMax", add("Neg", times), one, keepdims=0))
        else:
            times = add("Squeeze", times, one)
        flat = add("Reshape", own, add.constant("tree_flat", [0, -1], np.int64))
        return mine, times, flat

    @property
    def _levels(self) -> int:
        return tree_table(self.score.parents, self._classes).above.shape[1]
