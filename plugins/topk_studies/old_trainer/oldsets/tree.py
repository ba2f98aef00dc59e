"""The score of sets along a tree of classes, and the nodes that a set is made of."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from array_api_compat import array_namespace, device

from topk_studies.old_trainer.oldsets.scores import Array, Score, as_numpy, check_option, register_score


@dataclass(frozen=True)
class TreeTable:
    """A tree as arrays.

    Args:
        above: the nodes on the path of each class, from the root [n, D]; short paths end with the class again and
            again. Of nodes with the same classes the lowest stands for all.
        sizes: how many classes each of them has [n, D].
    """

    above: np.ndarray
    sizes: np.ndarray


@lru_cache(maxsize=8)
def tree_table(parents: tuple[int, ...], n: int) -> TreeTable:
    """The arrays of a tree of n classes, by the parent of each node; no parents: all classes are below one root."""
    if not parents:
        parents = (n,) * n + (-1,) if n > 1 else (-1,)
    sizes = np.zeros(len(parents), np.int64)
    sizes[:n] = 1
    lowest = np.arange(len(parents))
    for node, parent in enumerate(parents[:-1]):
        sizes[parent] += sizes[node]
    if sizes[-1] != n or (sizes[n:] == 0).any():
        raise ValueError(f"the tree has {len(parents) - len(set(parents) - {-1})} classes, the rows have {n}")
    for node, parent in enumerate(parents[:-1]):
        if sizes[node] == sizes[parent]:
            lowest[parent] = lowest[node]
    paths = []
    for y in range(n):
        path = [y]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(lowest[path[::-1]])
    above = np.array([[*path, *[y] * (max(map(len, paths)) - len(path))] for y, path in enumerate(paths)])
    return TreeTable(above, sizes[above])


@register_score
@dataclass(frozen=True)
class Tree(Score):
    """Sets along a tree of classes: one node, or a few.

    With m nodes, b_1, ..., b_m are the best m classes. The sets that a row can have are, in this order, {b_1},
    {b_1, b_2}, ..., {b_1, ..., b_m}, and then for c = 2, 3, ... the union over i of the largest node around b_i that
    has at most c classes. They are nested, and each is made of at most m nodes. The score of a class is minus the
    probability outside the last set that is without it: at the threshold -t a row gets the first of its sets with less
    than t outside. Told from outside it keeps its digits where the model is sure.

    Mortier et al. 2025 (arXiv 2501.19038) take nodes as sets, and the number of nodes as the complexity of a set; the
    nested family here is ours.

    Args:
        parents: the parent of each node, larger than the node; the classes come first, and the root last, with -1.
            Empty: all classes are below the root.
        nodes: m, the most nodes of a set.
    """

    name: ClassVar[str] = "tree"
    parents: tuple[int, ...] = ()
    nodes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(self.parents))  # JSON gives a list
        check_option(self.nodes >= 1 and int(self.nodes) == self.nodes, "nodes must be an integer from 1", self.nodes)
        count = len(self.parents)
        inner = sorted(set(self.parents) - {-1})
        right = not count or (
            self.parents[-1] == -1
            and all(node < parent for node, parent in enumerate(self.parents[:-1]))
            and inner == list(range(count - len(inner), count))
        )
        check_option(right, "parents must be larger than their nodes, the classes first and the root -1", self.parents)

    def __call__(self, values: Array, u: Array | float = 0.0) -> Array:
        xp = array_namespace(values)
        times, own = self.times(values)
        now = earlier = xp.full_like(values, -2.0)
        for k in range(own.shape[1]):
            at = own[:, k, None]
            before = -xp.sum(xp.where(times >= at, values, 0 * values), axis=-1, keepdims=True)
            # the largest of all times up to the class's: rounding must not undo the order of the sets
            now = xp.where((times >= at) & (before > now), before, now)
            earlier = xp.where((times > at) & (before > earlier), before, earlier)
        return now - u * (now - earlier)

    def times(self, values: Array) -> tuple[Array, Array]:
        """When each class comes into the set [B, n], and the times of all nodes around the best classes [B, m D].

        The best classes come at 0, 1 / m, 2 / m, ..., a class that is not among them with the first node around one of
        them that has it, at the number of the node's classes.
        """
        xp, where = array_namespace(values), device(values)
        table = tree_table(self.parents, values.shape[-1])
        above = xp.asarray(table.above, device=where)  # [n, D]
        sizes = xp.asarray(table.sizes, dtype=values.dtype, device=where)
        times, own = xp.full_like(values, float("inf")), []
        for turn, best in enumerate(self._best(values)):
            mine, at = xp.take(above, best, axis=0), xp.take(sizes, best, axis=0)  # [B, D]
            at = xp.where(at == 1, 0 * at + turn / self.most(values.shape[-1]), at)
            for d in range(above.shape[1]):
                inside = (mine[:, d, None] == above[None, :, d]) & (at[:, d, None] < times)
                times = xp.where(inside, at[:, d, None] + xp.zeros_like(values), times)
            own.append(at)
        return times, xp.concat(own, axis=-1)

    def nodes_of(self, values: Array, inside: Array) -> np.ndarray:
        """The nodes of sets bool [B, n] of one threshold, as numbers [B, m]; -1 in places that are left."""
        values, inside = as_numpy(values), as_numpy(inside).astype(bool)
        above = tree_table(self.parents, values.shape[-1]).above
        times, own = self.times(values)
        last = np.where(inside, times, -1.0).max(-1, keepdims=True)
        bests = self._best(values)
        own = own.reshape(len(values), len(bests), -1)
        mine = np.stack([above[best] for best in bests], 1)  # [B, m, D]
        nodes = np.where(own <= last[:, :, None], mine, -1).max(-1)
        for i in range(len(bests)):
            for j in range(len(bests)):
                held = (mine[:, i] == nodes[:, j, None]).any(-1)
                drop = held & ((nodes[:, j] > nodes[:, i]) | ((nodes[:, j] == nodes[:, i]) & (j < i)))
                nodes[drop, i] = -1
        return nodes

    def most(self, n: int) -> int:
        """The number of best classes that grow."""
        return min(self.nodes, n)

    def _best(self, values: Array) -> list[Array]:
        """The best classes [B] one after another; the lower index comes first among equal ones."""
        xp = array_namespace(values)
        places = xp.arange(values.shape[-1], device=device(values))
        left, classes = values, []
        for _ in range(self.most(values.shape[-1])):
            best = xp.argmax(left, axis=-1)
            classes.append(best)
            left = xp.where(places == best[:, None], xp.full_like(left, -float("inf")), left)
        return classes

    def largest(self, n: int) -> float:
        return 0.0
