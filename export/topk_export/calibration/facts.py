"""The facts of a calibration, as the metadata of the file keeps them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from topk_export.calibration.graph import largest_size
from topk_export.calibration.plan import Plan
from topk_export.runtime.metadata import SET_SEMANTICS, Metadata
from topk_export.runtime.ranking import softmax
from topk_export.samples import Samples
from topk_export.verification.graph import set_metadata
from topk_registry.conformal import PredictionSets

REFERENCE = 1000  # label-free values kept in the file for `topk-registry monitor`
GUARANTEES = {
    "marginal": "the label is in the set with probability at least {coverage:g}",
    "per_class": "within each class the label is in the set with probability at least {coverage:g}",
    "clustered": "the label is in the set with probability near {coverage:g}, class by class as far as clusters hold "
    "classes of like scores",
    "interpolated": "the label is in the set with probability at least {least:g}",
    "rc3p": "within each class the label is in the set with probability near {coverage:g}; top-k rates are estimates",
    "average_size": "none on coverage: the mean size of the sets is that wanted, on the calibration samples",
}


def facts_of(
    sets: PredictionSets,
    plan: Plan,
    parts: Mapping[str, np.ndarray],
    labels: np.ndarray,
    metadata: Metadata,
    samples: Samples,
    fingerprint: str,
) -> dict[str, Any]:
    """Return the entries on prediction sets in the file's metadata."""
    limits = sets.thresholds
    n, one = metadata.num_classes, not np.ndim(limits.scores)
    options = {key: value for key, value in sets.score.options().items() if key not in ("prior", "weights")}
    infinite = np.isinf(np.asarray(limits.scores))
    return {
        "score": sets.score.name,
        "options": options,
        "rule": plan.rule,
        "rule_options": dict(plan.rule_options),
        "alpha": plan.alpha,
        "guarantee": GUARANTEES[plan.rule].format(coverage=1 - plan.alpha, least=1 - 2 * plan.alpha),
        "threshold": float(limits.scores) if one else None,
        "temperature": sets.temperature,
        "allow_empty": sets.allow_empty,
        "max_size": largest_size(sets, n, plan.max_size),
        "samples": len(parts["calibrate"]),
        "tuning_samples": len(parts["tune"]),
        "report_samples": len(parts["report"]),
        "classes_without_samples": int((np.bincount(labels[parts["calibrate"]], minlength=n) == 0).sum()),
        "classes_in_every_set": int(infinite.sum()) if not one else 0,
        "data": samples.name,
        "fingerprint": fingerprint,
        "seed": plan.seed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def reference_of(logits: np.ndarray, rows: np.ndarray, sizes: np.ndarray, seed: int) -> dict[str, list[float]]:
    """Return the reference of monitoring: sizes, and softmax shares of the best class, of some report samples."""
    chosen = np.random.default_rng([seed, 1]).permutation(len(rows))[:REFERENCE]
    best = softmax(logits[rows[chosen]]).max(-1)
    return {"probability": [float(f"{p:.6g}") for p in best], "size": sizes[chosen].tolist()}


def stamp(built: Any, metadata: Metadata, facts: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    known = {prop.key: prop.value for prop in built.metadata_props}
    stamped = replace(metadata, sets=dict(facts), outputs={**metadata.outputs, **SET_SEMANTICS})
    set_metadata(built, {**known, **stamped.to_props(), "sets_reference": json.dumps(reference)})
