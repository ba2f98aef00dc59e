"""Accuracy under label noise: Berrada et al. 2018, Table 1; Garcin et al. 2022, Table 4."""

from collections.abc import Sequence

from topk_studies.engine import training
from topk_studies.engine.statistics import difference, judge
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record
from topk_studies.engine.tuning import Choice, choices, groups, label_noise_of, tuned_runs
from topk_studies.report.display import (
    commands,
    differences_table,
    grid_table,
    judge_pair,
    lines_figure,
    protocol,
    trials_table,
)

TITLE = "Label noise"
QUESTION = "Does a loss keep its accuracy where a share of the training labels is drawn anew within their superclass?"
REFERENCE = "Berrada et al. 2018, Table 1; Garcin et al. 2022, Table 4"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

LOSSES = ("ce", "smooth_topk_svm", "noised_topk")
LEVELS = {"small": (0.0, 0.4, 0.8, 1.0), "paper": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}
SEEDS = (0, 1, 2, 3, 4)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    return [
        configuration
        for level in LEVELS[options.budget]
        for loss in options.losses or LOSSES
        for configuration in tuned_runs(options, known, loss, options.seeds or SEEDS, {"label_noise": level})
    ]


def report(records: Sequence[Record]) -> Findings:
    found = choices(records)
    return Findings(
        tables=(
            grid_table("Accuracy by label noise", "noise", label_noise_of, found, "top5", REFERENCE),
            grid_table("Accuracy by label noise", "noise", label_noise_of, found, "top1", REFERENCE),
            differences_table(found, "noise", label_noise_of, ("top5", "top1")),
            trials_table(found, "noise", label_noise_of, "top5"),
        ),
        figures=(
            lines_figure("Top-5 accuracy against label noise", "label noise", label_noise_of, found, "top5"),
            lines_figure("Top-1 accuracy against label noise", "label noise", label_noise_of, found, "top1"),
        ),
        notes=tuple(_notes(found)),
        protocol=protocol(found),
        commands=commands("noise", records),
    )


def _notes(found: Sequence[Choice]) -> list[Note]:
    notes: list[Note] = []
    for level, here in groups(found, label_noise_of).items():
        where = f"noise {level:g}"
        if level == 0.0:
            claim = "On clean labels cross-entropy is no worse than the smooth top-5 SVM (Berrada, Table 1)."
            notes += judge_pair(claim, here, "ce", "smooth_topk_svm", "top5", where=where)
            continue
        claim = "With noisy labels the smooth top-5 SVM beats cross-entropy, in top-5 and in top-1 (Berrada, Table 1)."
        for metric in ("top5", "top1"):
            notes += judge_pair(claim, here, "smooth_topk_svm", "ce", metric, where=where)
        claim = "The balanced noised loss beats cross-entropy in top-5 under label noise (Garcin, Table 4)."
        notes += judge_pair(claim, here, "noised_topk", "ce", "top5", where=where)
    return notes + _together(found) + _growth(found)


def _together(found: Sequence[Choice]) -> list[Note]:
    """Top-5 gains over cross-entropy, averaged over all noisy levels before seeds are compared."""
    place = {(choice.loss, label_noise_of(choice)): choice.scores("top5") for choice in found}
    levels = sorted({level for _, level in place if level > 0})
    claims = {
        "smooth_topk_svm": "With noisy labels the smooth top-5 SVM beats cross-entropy in top-5 (Berrada, Table 1).",
        "noised_topk": "The balanced noised loss beats cross-entropy in top-5 under label noise (Garcin, Table 4).",
    }
    notes = []
    for loss, claim in claims.items():
        gains = [_gain(place, loss, level) for level in levels]
        seeds = set.intersection(*map(set, gains)) if gains else set()
        if seeds and len(levels) > 1:
            mean = {seed: sum(gain[seed] for gain in gains) / len(gains) for seed in seeds}
            words = f"mean over noise {', '.join(f'{level:g}' for level in levels)}, top-5 of {loss} less ce"
            notes.append(judge(claim, difference(mean, dict.fromkeys(mean, 0.0)), words))
    return notes


def _growth(found: Sequence[Choice]) -> list[Note]:
    """Whether the gain over cross-entropy is larger under the most noise than under none."""
    place = {(choice.loss, label_noise_of(choice)): choice.scores("top5") for choice in found}
    levels = sorted({level for _, level in place})
    gains = [_gain(place, "smooth_topk_svm", level) for level in (levels[0], levels[-1])] if levels else []
    if not gains or not all(gains):
        return []
    claim = "The gain over cross-entropy grows with the noise (Berrada, Table 1)."
    words = f"top-5 gain of smooth_topk_svm under noise {levels[-1]:g} less that under {levels[0]:g}"
    return [judge(claim, difference(gains[1], gains[0]), words)]


def _gain(place: dict[tuple[str, float], dict[int, float]], loss: str, level: float) -> dict[int, float]:
    ours, base = place.get((loss, level), {}), place.get(("ce", level), {})
    return {seed: ours[seed] - base[seed] for seed in ours.keys() & base.keys()}
