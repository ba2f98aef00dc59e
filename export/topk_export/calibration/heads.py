"""Heads of an exported file, run on the logits that the whole file gave."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from topk_export.calibration.graph import CLASSES, SCORES, SET, score_model, set_model
from topk_export.calibration.score_nodes import nodes_of
from topk_export.runtime.metadata import GROUP
from topk_export.runtime.session import open_session
from topk_export.verification.graph import LOGITS
from topk_registry.oldsets import Score, SetCounts
from topk_registry.oldsets.sets import best_classes, counted

ROWS = 256


class Heads:
    """Runs heads of the file on the logits that it gave."""

    def __init__(self, model: Any, logits: np.ndarray, device: str, groups: np.ndarray | None = None) -> None:
        self.model, self.logits, self.device, self.groups = model, logits, device, groups

    def outputs(self, head: Any, rows: np.ndarray, names: list[str]) -> Iterable[tuple[np.ndarray, list[np.ndarray]]]:
        """Row numbers and outputs, a block of rows at a time, through the batch size that the graph may fix."""
        session = open_session(head.SerializeToString(), device=self.device)
        fixed = session.get_outputs()[0].shape[0]
        size = fixed if isinstance(fixed, int) else ROWS
        by_group = self.groups is not None and any(x.name == GROUP for x in session.get_overridable_initializers())
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            padded = np.concatenate((block, block[:1].repeat(size - len(block)))) if isinstance(fixed, int) else block
            given = {LOGITS: self.logits[padded]}
            if by_group and self.groups is not None:
                given[GROUP] = self.groups[padded]
            yield block, [value[: len(block)] for value in session.run(names, given)]

    def evaluate(self, built: Any, rows: np.ndarray, labels: np.ndarray) -> tuple[SetCounts, np.ndarray, np.ndarray]:
        """Coverage and sizes of a calibrated file's sets, the size of each, and whether it holds the label."""
        total, sizes, hits = None, [], []
        for block, (inside,) in self.outputs(set_model(built), rows, [SET]):
            part = SetCounts.of(inside, labels[block])
            total = part if total is None else total + part
            sizes.append(inside.sum(-1))
            hits.append(inside[np.arange(len(block)), labels[block]])
        assert total is not None
        return total, np.concatenate(sizes), np.concatenate(hits)


@dataclass(frozen=True)
class HeadRows:
    """Calibration samples whose scores the graph computes (:class:`topk_registry.oldsets.rules.CalibrationRows`).

    Args:
        heads: run the graph.
        score: of a class.
        temperature: divides the logits.
        limit: the ranks that are looked at, beyond which scores are infinite; None: all classes, without a ranking.
        rows: the numbers of the samples [N].
        labels: theirs [N].
        allow_empty: see :class:`topk_registry.oldsets.PredictionSets`.
    """

    heads: Heads
    score: Score
    temperature: float
    limit: int | None
    rows: np.ndarray
    labels: np.ndarray
    allow_empty: bool

    @property
    def n(self) -> int:
        return self.heads.logits.shape[1]

    def label_scores(self) -> np.ndarray:
        return self._own

    @cached_property
    def _own(self) -> np.ndarray:
        return np.concatenate([_of_labels(*block) for block in self._blocks()])

    def all_scores(self) -> np.ndarray:
        return np.concatenate([scores for scores, _, _ in self._blocks()])

    def label_ranks(self) -> np.ndarray:
        """The rank of each label; beyond the limit it is that of the last class, as its score is that of no class."""
        places = label_ranks(self.heads.logits, self.rows, self.labels)
        return places if self.limit is None else np.where(places > self.limit, self.n, places)

    def _blocks(self) -> Iterable[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
        """Scores of the classes looked at [B, n or M], which they are (None: all), and labels [B]."""
        nodes = nodes_of(type(self.score))
        head = score_model(self.heads.model, self.score, temperature=self.temperature, max_size=self.limit)
        names = [SCORES] if self.limit is None else [SCORES, CLASSES]
        start = 0
        for block, outputs in self.heads.outputs(head, self.rows, names):
            scores, classes = nodes.from_graph(outputs[0]), outputs[1] if len(outputs) > 1 else None
            if not self.allow_empty:  # the graph ranks by logits: the best class is its first
                first = np.arange(scores.shape[1]) == 0
                scores = counted(scores, best_classes(outputs[0]) if classes is None else first)
            yield scores, classes, self.labels[start : start + len(block)]
            start += len(block)


def _of_labels(scores: np.ndarray, classes: np.ndarray | None, labels: np.ndarray) -> np.ndarray:
    if classes is None:
        return np.take_along_axis(scores, labels[:, None], -1)[:, 0]
    mine = classes == labels[:, None]
    return np.where(mine.any(-1), np.take_along_axis(scores, mine.argmax(-1)[:, None], -1)[:, 0], np.inf)


def label_ranks(logits: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The rank of the label of each of these rows, from 1; the lower index comes first among equal logits."""
    places = []
    for row, label in zip(rows, labels, strict=True):
        own = logits[row, label]
        places.append(1 + int((logits[row] > own).sum()) + int((logits[row, :label] == own).sum()))
    return np.array(places)
