"""Heads of an exported file, run on the logits that the whole file gave."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from topk_export.calibration.graph import CLASSES, SCORES, SET, score_model, set_model
from topk_export.runtime.session import open_session
from topk_export.verification.graph import LOGITS
from topk_registry.conformal import Score, SetCounts, log_odds
from topk_registry.conformal.scores import LogOdds

ROWS = 256


class Heads:
    """Runs heads of the file on the logits that it gave."""

    def __init__(self, model: Any, logits: np.ndarray, device: str) -> None:
        self.model, self.logits, self.device = model, logits, device

    def outputs(self, head: Any, rows: np.ndarray, names: list[str]) -> Iterable[tuple[np.ndarray, list[np.ndarray]]]:
        """Row numbers and outputs, a block of rows at a time, through the batch size that the graph may fix."""
        session = open_session(head.SerializeToString(), device=self.device)
        fixed = session.get_outputs()[0].shape[0]
        size = fixed if isinstance(fixed, int) else ROWS
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            x = self.logits[block]
            padded = np.concatenate((x, np.repeat(x[:1], size - len(x), 0))) if isinstance(fixed, int) else x
            yield block, [value[: len(block)] for value in session.run(names, {LOGITS: padded})]

    def label_scores(
        self, score: Score, temperature: float, limit: int | None, rows: np.ndarray, labels: np.ndarray
    ) -> np.ndarray:
        """The score of each row's label, as the graph computes it; infinite beyond the ``limit`` best classes."""
        head = score_model(self.model, score, temperature=temperature, max_size=limit)
        found = []
        for block, outputs in self.outputs(head, rows, [SCORES] if limit is None else [SCORES, CLASSES]):
            own = labels[block][:, None]
            if limit is None:
                found.append(np.take_along_axis(outputs[0], own, -1)[:, 0])
            else:
                mine = outputs[1] == own
                found.append(np.where(mine.any(-1), (outputs[0] * mine).sum(-1), np.inf))
        return _own_units(score, np.concatenate(found))

    def all_scores(self, score: Score, temperature: float, limit: int | None, rows: np.ndarray) -> np.ndarray:
        """The scores of all classes that the graph looks at [N, n or limit]."""
        head = score_model(self.model, score, temperature=temperature, max_size=limit)
        return _own_units(score, np.concatenate([outputs[0] for _, outputs in self.outputs(head, rows, [SCORES])]))

    def evaluate(self, built: Any, rows: np.ndarray, labels: np.ndarray) -> tuple[SetCounts, np.ndarray]:
        """Coverage and sizes of a calibrated file's sets, and the size of each."""
        total, sizes = None, []
        for block, (inside,) in self.outputs(set_model(built), rows, [SET]):
            part = SetCounts.of(inside, labels[block])
            total = part if total is None else total + part
            sizes.append(inside.sum(-1))
        assert total is not None
        return total, np.concatenate(sizes)


def _own_units(score: Score, scores: np.ndarray) -> np.ndarray:
    """Scores of the graph in the units of their definition: it keeps log-odds as minus their marginals."""
    if not isinstance(score, LogOdds):
        return scores
    return np.where(np.isinf(scores), np.inf, -log_odds(np.clip(-scores, 0, 1)))


def label_ranks(logits: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The rank of each row's label, from 1; the lower index comes first among equal logits."""
    places = []
    for row in rows:
        own = logits[row, labels[row]]
        places.append(1 + int((logits[row] > own).sum()) + int((logits[row, : labels[row]] == own).sum()))
    return np.array(places)
