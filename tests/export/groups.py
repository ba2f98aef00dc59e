"""A file with thresholds by group whose sets are known: lac, and levels of each group's own."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from topk_export.calibration.graph import add_sets
from topk_export.runtime.metadata import Metadata
from topk_export.verification import storage
from topk_export.verification.graph import set_metadata
from topk_registry.conformal import PredictionSets, Thresholds, create_score, probabilities

GROUPS = ("day", "night & fog/2", 'dä"mm,er=1', "rare")  # names that URLs, CSV and JSON must quote
LEVELS = (0.2, 0.9, 0.999, np.inf)  # the last has too few samples: all classes


def grouped(model: Path, output: Path) -> Path:
    """Write the file of a model of colours with these thresholds."""
    sets = PredictionSets(create_score("lac"), Thresholds(np.array(LEVELS), None, GROUPS))
    proto = storage.load(model)
    metadata = Metadata.from_props({prop.key: prop.value for prop in proto.metadata_props})
    built = add_sets(proto, sets, metadata.num_classes, max_size=metadata.num_classes)
    known = {prop.key: prop.value for prop in built.metadata_props}
    facts = {"guarantee": "none", "samples": 0, "date": "2026-01-01", "groups": [{"name": name} for name in GROUPS]}
    set_metadata(built, {**known, **replace(metadata, sets=facts).to_props()})
    storage.save(built, output, source=model.parent)
    return output


def expected_sets(logits: np.ndarray, groups: list[int]) -> np.ndarray:
    """The sets of logits [B, n] by the definition: 1 - p is at most the group's level, and the best class."""
    p = probabilities(logits.astype(np.float64))
    return (1 - p <= np.array(LEVELS)[groups][:, None]) | (p == p.max(-1, keepdims=True))
