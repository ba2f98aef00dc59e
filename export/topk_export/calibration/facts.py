"""The facts of a calibration, as the metadata of the file keeps them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from topk_export.calibration.graph import largest_size
from topk_export.calibration.plan import Plan
from topk_export.runtime.metadata import NODE_SEMANTICS, SET_SEMANTICS, Metadata
from topk_export.runtime.ranking import softmax
from topk_export.samples import Samples
from topk_export.verification.graph import set_metadata
from topk_registry.oldsets import RULES, PredictionSets, Tree
from topk_registry.oldsets.thresholds import as_fraction

REFERENCE = 1000  # label-free values kept in the file for `topk-registry monitor`


def facts_of(
    sets: PredictionSets,
    plan: Plan,
    parts: Mapping[str, np.ndarray],
    labels: np.ndarray,
    metadata: Metadata,
    samples: Samples,
    fingerprint: str,
    at_threshold: int | None,
) -> dict[str, Any]:
    """Return the entries on prediction sets in the file's metadata."""
    limits = sets.thresholds
    n, one = metadata.num_classes, not np.ndim(limits.scores)
    by_rank = sets.score.ranked or limits.max_rank is not None
    limit = plan.max_size if by_rank and not isinstance(sets.score, Tree) else n
    share = 1 - as_fraction(plan.alpha)
    return {
        "score": sets.score.name,
        "options": sets.score.numbers(),
        **({} if plan.tree is None else {"tree": {"names": plan.tree.names, "parents": plan.tree.parents}}),
        "rule": plan.rule,
        "rule_options": dict(plan.rule_options),
        "alpha": plan.alpha,
        "guarantee": ("within each group " if limits.groups else "")
        + RULES[plan.rule].promise.format(coverage=float(share), least=float(max(0, 2 * share - 1))),
        # JSON knows no infinity: where the best class alone covers enough there is no threshold to tell
        "threshold": float(limits.scores) if one and np.isfinite(limits.scores) else None,
        "best_class_alone": bool(one and np.isneginf(limits.scores)),
        "samples_at_threshold": at_threshold,
        "temperature": sets.temperature,
        "allow_empty": sets.allow_empty,
        "max_size": largest_size(sets, n, limit),  # of rows without NaN
        "samples": len(parts["calibrate"]),
        "tuning_samples": len(parts["tune"]),
        "report_samples": len(parts["report"]),
        "classes_without_samples": int((np.bincount(labels[parts["calibrate"]], minlength=n) == 0).sum()),
        "classes_in_every_set": int(limits.unlimited(n).sum()),
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
    there = {output.name for output in built.graph.output}
    nodes = {name: text for name, text in NODE_SEMANTICS.items() if name in there}
    stamped = replace(metadata, sets=dict(facts), outputs={**metadata.outputs, **SET_SEMANTICS, **nodes})
    set_metadata(built, {**known, **stamped.to_props(), "sets_reference": json.dumps(reference)})
