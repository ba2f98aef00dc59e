"""Reasons why a comparison of losses decides nothing, however many seeds it has, and the way to a verdict of each.

A metric that a guess does well in leaves no room above it. A loss that is no better than a guess has learnt nothing. A
trial that tied with others on a few images was chosen by their order, and a learning rate at the edge of its grid may
have a better one beyond. Losses that are right on the same images differ in nothing that was measured.
"""

from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean
from typing import Any

from topk_studies.engine.statistics import EFFECT, Claim
from topk_studies.engine.store import canonical
from topk_studies.engine.study import Note
from topk_studies.engine.tuning import Choice, metric_of, score
from topk_studies.old_trainer.config.metric_names import METRIC
from topk_studies.report.display import metric_name

FURTHER = 8  # times beyond the edge that the next grid may go
FOLDS = 5


@dataclass(frozen=True)
class Doubt:
    """A reason for no verdict, and what would give one."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason} {self.remedy}"


@dataclass(frozen=True)
class Rung:
    """Trials of one length: the mean validation score of each over its folds."""

    scores: dict[str, float]
    rates: tuple[float, ...]


def doubted(claim: Claim, note: Note) -> Note:
    """The note without a verdict, where there are reasons for none.

    A loss that is ahead although its own tuning is in doubt is ahead still; one that is behind might not be.
    """
    best, other = claim.choices
    reasons = [*of_the_tuning(other), *_of_the_scores(best, other)]
    if note.verdict != "agrees":
        reasons = [*of_the_tuning(best), *reasons]
    words = [doubt.reason for doubt in of_the_metric(best)] + [str(doubt) for doubt in reasons]
    return replace(note, verdict="none", evidence=f"{note.evidence}. {' '.join(words)}") if words else note


def of_the_metric(best: Choice) -> list[Doubt]:
    """Doubts that the best loss, and with it every comparison, stands under."""
    metric = _metric(best)
    match, data = METRIC.fullmatch(metric), _data(best)
    classes = data.get("classes") or best.flags.get("num_classes")
    if match is None or match[2] is None or not classes:
        return []
    k = int(match[2])
    if large := of_k(k, classes):
        return large
    guess = data.get("guess", {}).get(metric, 100 * k / classes)
    reached, images = fmean(best.scores(metric).values()), data.get("images", {}).get("test")
    # two standard deviations of a guess's share of the images; none is known of a stream
    chance = 2 * sqrt(guess * (100 - guess) / images) if images else 0.0
    if reached > guess + chance:
        return []
    return [
        Doubt(
            f"{best.loss} reaches {reached:.1f} % in {metric_name(metric)}, no more than a guess ({guess:.1f} %) may.",
            "Train longer, --flags epochs=N, or with more images.",
        )
    ]


def of_k(k: int, classes: int) -> list[Doubt]:
    """Doubt of a k that a guess does well with."""
    if 2 * k <= classes:
        return []
    guess = 100 * min(1.0, k / classes)
    smaller = max(1, classes // 3)
    reason = f"top-{k} of {classes} classes: a guess is right in {guess:.1f} %."
    return [Doubt(reason, f'Take a smaller k: --flags loss_opt="k={smaller}".')]


def of_few_images(images: int, folds: int) -> list[Doubt]:
    """Doubt of validation images that are so few that one of them is more than the smallest difference that matters."""
    if not images or 100 / (images * folds) <= EFFECT:
        return []
    each = f" in each of {folds} folds" if folds > 1 else ""
    reason = f"{images} validation images{each}: one is {100 / (images * folds):.1f} points."
    remedy = "Tune with more images." if folds > 1 else f"Tune on folds, --folds {FOLDS}, or with more images."
    return [Doubt(reason, remedy)]


def of_the_tuning(choice: Choice) -> list[Doubt]:
    """Doubts about the setting that tuning ended with."""
    return [*_of_ties(choice), *_of_the_edge(choice)]


def rungs(choice: Choice) -> list[Rung]:
    """The rounds of tuning, the shortest runs first."""
    metric = _metric(choice)
    by_epochs: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for record in choice.trials:
        flags = record.configuration["flags"]
        trial = canonical({name: flags.get(name) for name in ("lr", *choice.trial)})
        reached = score(record, metric, "validation"), flags["lr"]
        by_epochs.setdefault(flags["epochs"], {}).setdefault(trial, []).append(reached)
    return [
        Rung(
            {trial: fmean(one for one, _ in folds) for trial, folds in by_epochs[epochs].items()},
            tuple(sorted({lr for folds in by_epochs[epochs].values() for _, lr in folds})),
        )
        for epochs in sorted(by_epochs)
    ]


def _of_ties(choice: Choice) -> list[Doubt]:
    """Doubt of a trial that was kept by its order: another that was dropped had the same score."""
    every = rungs(choice)
    images = _data(choice).get("images", {}).get("validation", 0)
    coarse = of_few_images(images, _folds(choice))
    for i, rung in enumerate(every):
        scores = sorted(rung.scores.values(), reverse=True)
        kept = len(every[i + 1].scores) if i + 1 < len(every) else 1
        if kept >= len(scores) or scores[kept - 1] != scores[kept]:
            continue
        tied = scores.count(scores[kept])
        if coarse or tied == len(scores) > 2:  # two settings may well be equally good
            where = f" on {images} validation images" if images else ""
            reason = f"{choice.loss}: {tied} of {len(scores)} trials tie at {scores[kept]:.1f} %{where}."
            return [Doubt(reason, coarse[0].remedy if coarse else "Take a smaller k, or longer training.")]
    return []


def _of_the_edge(choice: Choice) -> list[Doubt]:
    """Doubt of a learning rate that is the lowest or the highest of those tried."""
    tried = {record.configuration["flags"]["lr"] for record in choice.trials}
    lr, low, high = choice.trial.get("lr"), min(tried, default=0.0), max(tried, default=0.0)
    if low == high or lr not in (low, high):
        return []
    wider = (low / FURTHER, high) if lr == low else (low, high * FURTHER)
    return [
        Doubt(
            f"{choice.loss}: lr={lr:g} is the {'lowest' if lr == low else 'highest'} that was tried.",
            f"Widen the grid: --rates {wider[0]:.3g} {wider[1]:.3g}.",
        )
    ]


def _of_the_scores(best: Choice, other: Choice) -> list[Doubt]:
    """Doubt of two losses that have the same score in every run."""
    metric = _metric(best)
    first, second = best.scores(metric), other.scores(metric)
    common = first.keys() & second.keys()
    if not common or any(first[seed] != second[seed] for seed in common):
        return []
    reason = f"{best.loss} and {other.loss} tie on every seed, at {fmean(first.values()):.1f} %."
    return [Doubt(reason, "Take a smaller k, or more test images.")]


def _metric(choice: Choice) -> str:
    return metric_of(list(choice.runs.values()))


def _folds(choice: Choice) -> int:
    return len({record.configuration["flags"].get("val_fold", 0) for record in choice.trials})


def _data(choice: Choice) -> dict[str, Any]:
    """Facts of the data, as the runs noted them."""
    return next((record.result["data"] for record in choice.runs.values() if record.result.get("data")), {})
