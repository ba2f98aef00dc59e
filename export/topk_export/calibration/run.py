"""Calibration of an exported file: run it over held-out images, find thresholds, write a new file and a report.

The images are split at random into three parts. One tunes (the options of a score, a temperature, a prior), one
calibrates, one reports: no sample serves two purposes, so that the guarantee and the reported coverage both hold.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.calibration.facts import facts_of, reference_of, stamp
from topk_export.calibration.graph import NODES, SET, add_sets, set_model
from topk_export.calibration.heads import HeadRows, Heads
from topk_export.calibration.plan import Plan, check, split
from topk_export.calibration.score_nodes import check_fits, nodes_of
from topk_export.errors import ExportError, ModelFileError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.weights import move_into_place
from topk_export.samples import Samples
from topk_export.verification import storage
from topk_export.verification.graph import LOGITS
from topk_registry.folders.agreement import agreement
from topk_registry.folders.groups import numbered
from topk_registry.oldsets import (
    RULES,
    PredictionSets,
    Score,
    SetCounts,
    fit_softmax_temperature,
    marginal,
    per_group,
    probabilities,
    tune,
)
from topk_registry.oldsets.rules import find_thresholds
from topk_registry.oldsets.scores import score_kind
from topk_registry.oldsets.summary import GroupCoverage, group_coverage
from topk_registry.oldsets.thresholds import check_labels, fewest
from topk_registry.oldsets.tuning import is_tuned

Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration: the sets, their evaluation, and the facts that are written down."""

    sets: PredictionSets
    facts: dict[str, Any]
    counts: SetCounts
    class_counts: np.ndarray  # calibration samples of each class [n]
    temperatures: list[dict[str, float]]
    class_names: tuple[str, ...]
    groups: tuple[GroupCoverage, ...] = ()


def quiet(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    return items


def calibrate_file(
    model: str | Path,
    output: str | Path,
    samples: Samples,
    plan: Plan,
    *,
    device: str = "auto",
    require_gpu: bool = False,
    threads: int | None = None,
    batch_size: int = 32,
    progress: Progress = quiet,
    force: bool = False,
) -> Calibrated:
    """Calibrate an exported file on held-out samples, and write the result as a new file.

    The file appears whole or not at all. It was run before it appeared: its sets are those of the calibration.

    Args:
        model: as :func:`topk_export.export_onnx` writes it.
        output: another file.
        samples: held-out images with labels, from neither training nor model selection.
        plan: what to calibrate.
        device, require_gpu, threads: see :class:`topk_export.Predictor`.
        batch_size: images a run.
        progress: wraps an iterable with a label and a total.
        force: go on where labels look wrong: where accuracy is near chance, or the images of folders are taken for
            classes that are not theirs.

    Raises:
        WrongLabelsError: labels look wrong.
    """
    output = Path(output)
    if output.exists() and output.samefile(model):
        raise ValueError(f"calibration writes a new file, {output} is the one it reads")
    predictor = Predictor(model, device=device, require_gpu=require_gpu, threads=threads)
    metadata = predictor.metadata
    if metadata.several:
        raise ModelFileError(
            f"expected a file with one label an image, {model} gives several: it takes targets of 0 and 1 for each "
            "class (calibrate_label_file; on the command line --labels-csv, or a data set of several labels)"
        )
    n = metadata.num_classes
    labels = check_labels(samples.labels, n)
    parts = split(len(labels), plan)
    names, groups = numbered(samples.groups, len(labels))
    check(plan, parts, n, groups=bool(names))
    proto = storage.load(model)
    check_fits(proto, plan)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.stem}-") as folder:
        staged = Path(folder) / output.name
        logits, fingerprint = run_all(predictor, samples, labels, batch_size, progress, Path(folder))
        right = agreement(logits.argmax(-1), labels, metadata.class_names)
        right.check(force=force)
        runner = Heads(proto, logits, device, groups)
        calibration = _calibrate(runner, labels, parts, plan, metadata, names)
        facts = facts_of(calibration[0], plan, parts, labels, metadata, samples, fingerprint, calibration[2])
        facts |= {"top1": right.accuracy, "classes": samples.told}
        built = add_sets(proto, calibration[0], n, max_size=plan.max_size)
        counts, sizes, hits = runner.evaluate(built, parts["report"], labels)
        by_group: tuple[GroupCoverage, ...] = ()
        if groups is not None:
            calibrated, reported = groups[parts["calibrate"]], groups[parts["report"]]
            by_group = group_coverage(names, calibrated, reported, sizes, hits, plan.alpha)
        facts |= _facts_of_groups(calibration[0], by_group)
        facts |= {f"report_{name}": round(value, 6) for name, value in counts.summary().items() if np.isfinite(value)}
        reference = reference_of(logits, parts["report"], sizes, plan.seed)
        stamp(built, metadata, facts, reference)
        import onnx

        storage.save(built, staged, source=Path(model).parent)
        onnx.checker.check_model(str(staged), full_check=True)
        names_there = [name for name in (SET, NODES) if name in {output.name for output in built.graph.output}]
        check_written(staged, samples, parts["report"][:batch_size], runner, built, names_there)
        move_into_place(staged, output)
        del logits, runner  # so that every system lets the folder go
    return Calibrated(
        calibration[0],
        facts,
        counts,
        np.bincount(labels[parts["calibrate"]], minlength=n),
        calibration[1],
        metadata.class_names,
        by_group,
    )


def _facts_of_groups(sets: PredictionSets, by_group: Sequence[GroupCoverage]) -> dict[str, Any]:
    if not by_group:
        return {}
    groups = []
    for row, limit in zip(by_group, np.asarray(sets.thresholds.scores), strict=True):
        # JSON knows no infinity: of too few samples, or where the best class alone covers enough
        known = {"threshold": float(limit) if np.isfinite(limit) else None, "all_classes": bool(np.isposinf(limit))}
        report = {"report_samples": row.seen, "report_hits": row.hits}
        groups.append({"name": row.name, "samples": row.samples, "missing": row.missing, **known, **report})
    return {"groups": groups}


def run_all(
    predictor: Predictor, samples: Samples, labels: np.ndarray, size: int, progress: Progress, folder: Path
) -> tuple[np.ndarray, str]:
    """The logits of all samples [N, n], in a file of the folder, and the SHA-256 of inputs and labels."""
    shape = (len(labels), predictor.metadata.num_classes)
    logits = np.lib.format.open_memmap(folder / "logits.npy", mode="w+", dtype=np.float32, shape=shape)
    digest = hashlib.sha256(labels.tobytes())
    starts = range(0, len(labels), size)
    for start in progress(starts, "images", len(starts)):
        images = [samples.images[i] for i in range(start, min(start + size, len(labels)))]
        batch = predictor.preprocess(images)
        digest.update(batch.tobytes())
        logits[start : start + len(images)] = predictor.run(batch)[LOGITS]
    bad = np.flatnonzero(~np.isfinite(logits.max(-1)))
    if len(bad):
        raise ExportError(f"the logits of {len(bad)} images are not finite; the first is number {bad[0]}")
    return logits, digest.hexdigest()


def _calibrate(
    runner: Heads,
    labels: np.ndarray,
    parts: Mapping[str, np.ndarray],
    plan: Plan,
    metadata: Metadata,
    groups: tuple[str, ...] = (),
) -> tuple[PredictionSets, list[dict[str, float]], int | None]:
    """The sets, their size at each temperature that was looked at, and the samples at the threshold where it is one."""
    n, rows = metadata.num_classes, parts["calibrate"]
    tuning = parts["tune"]
    temperature = plan.temperature
    if temperature is None:
        temperature = fit_softmax_temperature(runner.logits[tuning], labels[tuning])
    score = _score(runner, labels, tuning, plan, metadata, temperature)
    limit = min(plan.max_size, n) if score.ranked or RULES[plan.rule].limits_ranks else None
    samples = HeadRows(runner, score, temperature, limit, rows, labels[rows], plan.allow_empty)
    if groups and runner.groups is not None:
        limits = per_group(samples.label_scores(), runner.groups[rows], groups, plan.alpha)
        enough = np.bincount(runner.groups[rows], minlength=len(groups)) >= max(1, fewest(plan.alpha))
    else:
        limits = find_thresholds(samples, plan.alpha, plan.rule, **plan.all_rule_options)
        enough = np.array(not np.ndim(limits.scores))
    missed = (np.isposinf(limits.scores) & enough).any()
    if plan.rule == "interpolated" and limit is not None:  # which cuts what is infinite
        missed = np.isposinf(marginal(samples.label_scores(), plan.alpha))
    if missed:
        beyond = "have an infinite score" if limit is None else f"are beyond the {limit} best classes, which are all"
        raise ValueError(
            f"more than {plan.alpha:g} of the labels {beyond} that score {score.name} looks at: take a larger "
            "max_size, a larger alpha, or score lac, which looks at all"
        )
    if limits.max_rank is None and limit is not None and limit < n:  # a class beyond has an infinite score
        ranks = limit if limits.groups else np.where(np.isposinf(limits.scores), n, limit)[()]
        limits = replace(limits, max_rank=ranks)
    sets = PredictionSets(score, limits, temperature, plan.allow_empty)
    looked = sorted({1.0, temperature}) if len(tuning) else [temperature]
    some = slice(None, None, max(1, len(rows) // 2000))
    few = replace(samples, rows=rows[some], labels=labels[rows[some]])
    sizes = [{"temperature": t, "mean_size": _mean_size(replace(few, temperature=t), plan.alpha)} for t in looked]
    one = plan.rule == "marginal" and not groups
    return sets, sizes, int((samples.label_scores() == limits.scores).sum()) if one else None


def _score(
    runner: Heads, labels: np.ndarray, tuning: np.ndarray, plan: Plan, metadata: Metadata, temperature: float
) -> Score:
    score = nodes_of(score_kind(plan.score)).create(plan, metadata, labels[tuning])
    if not is_tuned(score.name, dict(plan.options)):
        return score
    values = probabilities(runner.logits[tuning], temperature)
    return tune(score, values, labels[tuning], plan.alpha, allow_empty=plan.allow_empty)


def _mean_size(samples: HeadRows, alpha: float) -> float:
    """The mean size of these samples' sets of one threshold, their own."""
    if len(samples.rows) < fewest(alpha):
        return float("nan")
    return float((samples.all_scores() <= marginal(samples.label_scores(), alpha)).sum(-1).mean())


def check_written(
    path: Path, samples: Samples, rows: np.ndarray, runner: Heads, built: Any, names: Sequence[str] = (SET,)
) -> None:
    """Run the written file on images, and compare with what its report says."""
    written = Predictor(path, device=runner.device)
    groups = None if runner.groups is None else runner.groups[rows]
    out = written.run(written.preprocess([samples.images[i] for i in rows]), groups=groups)
    scale = float(np.abs(runner.logits[rows]).max())
    if np.abs(out[LOGITS] - runner.logits[rows]).max() > 1e-4 * scale:
        raise ExportError("the calibrated file gives other logits than the file it was made of, so none was written")
    # on the file's own logits of this run, which other batches may round otherwise
    again = Heads(runner.model, out[LOGITS], runner.device, groups)
    parts = [outputs for _, outputs in again.outputs(set_model(built), np.arange(len(rows)), list(names))]
    expected = map(np.concatenate, zip(*parts, strict=True))
    if any((out[name] != values).any() for name, values in zip(names, expected, strict=True)):
        raise ExportError("the calibrated file gives other sets than its head alone, so none was written")
