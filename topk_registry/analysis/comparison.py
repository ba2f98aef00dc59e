"""Is a classifier better than another one, on the same images? Differences, intervals, exact tests and a verdict.

Every measure is computed for the first model and for each other one. Resamples of the images, the same for all models,
give the interval of a difference; where an image is right or wrong, McNemar's exact test gives its p-value. A verdict
needs a p-value that is corrected for all measures and models.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from topk_registry.analysis.measures import (
    Floats,
    Integers,
    check_scores,
    label_log_likelihoods,
    top_classes,
    topk_credits,
)
from topk_registry.analysis.paired import (
    Statistic,
    difference_p,
    equivalence_p,
    holm,
    images_needed,
    interval,
    macro_mean_of,
    mcnemar,
    mean_of,
    resamples,
)
from topk_registry.analysis.set_sizes import set_size_of
from topk_registry.oldsets import fit_softmax_temperature

LEAST = 4  # times tests over alpha, resamples: at half of them the least p-value there is would be alpha, corrected
Verdict = Literal["better", "worse", "equivalent", "not decided"]


@dataclass(frozen=True)
class Difference:
    """A measure of two models.

    Args:
        measure: its name.
        unit: ``"%"`` for accuracies, ``"nats"`` or ``"classes"``.
        first, second: of the models.
        difference: second less first.
        low, high: of the interval of the difference.
        p: of "no difference": McNemar's where images are right or wrong, else of the bootstrap.
        adjusted: ``p`` corrected for all verdicts.
        equivalence: p-value of "a difference of at least the margin", corrected for all verdicts.
        margin: the smallest difference that matters, in the unit.
        verdict: on the second model.
        gained, lost: how many images became right, and wrong; None where the measure does not count images.
        images_needed: about how many images would decide; None where it is decided, or no number would.
    """

    measure: str
    unit: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    adjusted: float
    equivalence: float
    margin: float
    verdict: Verdict
    gained: int | None = None
    lost: int | None = None
    images_needed: int | None = None


@dataclass(frozen=True)
class Changes:
    """The images whose best class became right, or wrong.

    Args:
        gained, lost: their numbers, those first whose label's log-likelihood changed most.
        by_class: classes with their numbers of images, gained and lost, the largest change first.
    """

    gained: Integers
    lost: Integers
    by_class: list[dict[str, Any]]


@dataclass(frozen=True)
class Against:
    """A model beside the first one."""

    name: str
    differences: list[Difference]
    changes: Changes


@dataclass(frozen=True)
class Comparison:
    """Models on the same images, each beside the first.

    Args:
        names: of the models.
        images: how many there are.
        classes: how many there are.
        settings: of the comparison.
        others: every model but the first.
        predicted: the best class of each image by model [models, N].
        labels: of the images [N].
        class_names: of the classes.
    """

    names: tuple[str, ...]
    images: int
    classes: int
    settings: dict[str, Any]
    others: list[Against]
    predicted: list[Integers] = field(repr=False)
    labels: Integers = field(repr=False)
    class_names: tuple[str, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain types, for JSON."""
        return {
            "models": list(self.names),
            "images": self.images,
            "classes": self.classes,
            "settings": self.settings,
            "comparisons": [
                {
                    "model": other.name,
                    "against": self.names[0],
                    "measures": [asdict(difference) for difference in other.differences],
                    "gained": other.changes.gained.tolist(),
                    "lost": other.changes.lost.tolist(),
                    "by_class": other.changes.by_class,
                }
                for other in self.others
            ],
        }


@dataclass(frozen=True)
class _Measure:
    """A measure over all models: values on the images, and statistics of draws."""

    name: str
    unit: str
    values: list[float]
    statistics: list[Statistic]
    margin: float
    rises: bool = True  # larger is better
    right: list[np.ndarray] | None = None  # [N] of each model, where images are right or wrong


def compare(
    logits: Sequence[Any],
    labels: Any,
    *,
    names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    k: Sequence[int] = (1, 5),
    margin: float = 0.5,
    coverage: float = 0.9,
    alpha: float = 0.05,
    fit_temperature: bool = False,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare classifiers on the same images, each with the first.

    Measures are top-k and macro top-k accuracy for each k below the number of classes, the mean log-likelihood of the
    label, and the mean size of prediction sets of one coverage. The margin is in percent points of accuracy. For the
    log-likelihood it is as many hundredths of a nat, about a percent of the label's probability each; for sizes it is a
    percentage of the first model's.

    A verdict is ``equivalent`` where two one-sided tests show the difference to be within the margin, else ``better``
    or ``worse`` where "no difference" is rejected, else ``not decided``. With probability at least 1 - alpha no verdict
    on any measure or model is wrong: p-values are corrected by Holm's method, and the two tests of a measure count
    once, as not both of their null hypotheses can be true.

    Args:
        logits: scores [N, n] of each model; their softmax is its probabilities.
        labels: of the images [N].
        names: of the models; by default their numbers.
        class_names: of the classes; by default their numbers.
        k: set sizes of accuracies.
        margin: the smallest difference that matters.
        coverage: of prediction sets.
        alpha: the probability of any wrong verdict; intervals hold 1 - alpha each.
        fit_temperature: divide each model's scores by the temperature at which these labels are most likely, as the
            scores of a loss that is no log-likelihood, such as a hinge, have a scale of their own. Accuracies stay.
        resamples: of the bootstrap; more are drawn where verdicts on so many measures and models need them.
        seed: of the resamples.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = rng.integers(0, 10, 400)
        >>> better = 4 * np.eye(10)[labels] + rng.normal(size=(400, 10))
        >>> found = compare([rng.normal(size=(400, 10)), better], labels)
        >>> [(d.measure, d.verdict) for d in found.others[0].differences][0]
        ('top-1', 'better')

    Reference: McNemar 1947; Efron 1979 (the bootstrap); Schuirmann 1987 (two one-sided tests); Holm 1979.
    """
    scores, given, called, classes = _checked(logits, labels, names, class_names)
    if not (margin > 0 and 0 < coverage < 1 and 0 < alpha < 1 and resamples >= 100):
        raise ValueError(
            "expected margin > 0, 0 < coverage < 1, 0 < alpha < 1 and at least 100 resamples, got "
            f"{margin}, {coverage}, {alpha} and {resamples}"
        )
    temperatures = [fit_softmax_temperature(each, given) if fit_temperature else 1.0 for each in scores]
    if fit_temperature:
        scores = [each / temperature for each, temperature in zip(scores, temperatures, strict=True)]
    sizes = sorted({size for size in k if size < len(classes)})
    likelihoods = [label_log_likelihoods(each, given) for each in scores]
    measures = _measures(scores, likelihoods, given, sizes, margin, coverage)
    # fewer could not make a p-value small enough for the correction
    count = max(resamples, math.ceil(LEAST * len(measures) * (len(scores) - 1) / alpha))
    drawn = _draw(measures, len(given), count, seed)  # [measure][model][B]
    others = _judged(measures, drawn, called, given, margin, alpha)
    predicted = [top_classes(each) for each in scores]
    return Comparison(
        names=called,
        images=len(given),
        classes=len(classes),
        settings={
            "k": sizes,
            "margin": margin,
            "coverage": coverage,
            "alpha": alpha,
            "temperatures": temperatures,
            "resamples": count,
            "seed": seed,
        },
        others=[
            Against(called[m], others[m - 1], _changes(predicted, likelihoods, given, m, classes))
            for m in range(1, len(scores))
        ],
        predicted=predicted,
        labels=given,
        class_names=classes,
    )


def _checked(
    logits: Sequence[Any], labels: Any, names: Sequence[str] | None, class_names: Sequence[str] | None
) -> tuple[list[np.ndarray], Integers, tuple[str, ...], tuple[str, ...]]:
    checked = [check_scores(each, labels) for each in logits]
    if len(checked) < 2:
        raise ValueError(f"expected the scores of at least two models, got {len(checked)}")
    shapes = {each.shape for each, _ in checked}
    if len(shapes) > 1:
        raise ValueError(f"expected scores of the same images and classes, got {' and '.join(map(str, shapes))}")
    n = checked[0][0].shape[1]
    called = tuple(names or (f"model {m}" for m in range(1, len(checked) + 1)))
    classes = tuple(class_names or map(str, range(n)))
    if len(called) != len(checked) or len(classes) != n:
        raise ValueError(
            f"expected {len(checked)} names of models and {n} of classes, got {len(called)} and {len(classes)}"
        )
    return [each for each, _ in checked], checked[0][1], called, classes


def _measures(
    scores: Sequence[np.ndarray],
    likelihoods: Sequence[Floats],
    labels: Integers,
    sizes: Sequence[int],
    margin: float,
    coverage: float,
) -> list[_Measure]:
    """The measures; images are drawn in the order of their labels, so that those of a class lie side by side."""
    order = np.argsort(labels, kind="stable")
    measures = []
    credits_ = {size: [topk_credits(each, labels, size)[order] for each in scores] for size in sizes}
    for size, values in credits_.items():
        means, statistics = [100 * float(v.mean()) for v in values], [mean_of(100 * v) for v in values]
        measures.append(_Measure(f"top-{size}", "%", means, statistics, margin, right=[v >= 0.5 for v in values]))
    every = np.ones((1, len(labels)))
    for size, values in credits_.items():
        statistics = [macro_mean_of(100 * v, labels[order]) for v in values]
        measures.append(
            _Measure(f"macro top-{size}", "%", [float(s(every)[0]) for s in statistics], statistics, margin)
        )
    means = [float(v.mean()) for v in likelihoods]
    measures.append(_Measure("log-likelihood", "nats", means, [mean_of(v[order]) for v in likelihoods], margin / 100))
    pairs = [set_size_of(each, own, coverage, order) for each, own in zip(scores, likelihoods, strict=True)]
    means = [mean for mean, _ in pairs]
    statistics = [statistic for _, statistic in pairs]
    name, limit = f"set size at {coverage:.0%}", margin / 100 * means[0]
    measures.append(_Measure(name, "classes", means, statistics, limit, rises=False))
    return measures


def _draw(measures: Sequence[_Measure], images: int, count: int, seed: int) -> list[list[Floats]]:
    parts: list[list[list[Floats]]] = [[[] for _ in measure.statistics] for measure in measures]
    for block in resamples(images, count, seed):
        for measure, kept in zip(measures, parts, strict=True):
            for statistic, values in zip(measure.statistics, kept, strict=True):
                values.append(statistic(block))
    return [[np.concatenate(values) for values in kept] for kept in parts]


def _judged(
    measures: Sequence[_Measure],
    drawn: Sequence[Sequence[Floats]],
    names: Sequence[str],
    labels: Integers,
    margin: float,
    alpha: float,
) -> list[list[Difference]]:
    """The differences of each model from the first, with verdicts that are corrected together."""
    tests = []
    for m in range(1, len(names)):
        for measure, values in zip(measures, drawn, strict=True):
            differences = values[m] - values[0]
            gap = interval(measure.values[m] - measure.values[0], differences, 1 - alpha)
            counts = _counts(measure.right, m)
            p = difference_p(differences) if counts is None else mcnemar(*counts)
            tests.append((m, measure, gap, counts, p, equivalence_p(differences, measure.margin)))
    pairs = [p for test in tests for p in test[4:]]
    adjusted = holm(pairs, [i // 2 for i in range(len(pairs))])
    by_model: list[list[Difference]] = [[] for _ in names[1:]]
    for i, (m, measure, gap, counts, p, _) in enumerate(tests):
        differs, same = adjusted[2 * i], adjusted[2 * i + 1]
        verdict = _verdict(gap.value if measure.rises else -gap.value, differs, same, alpha)
        by_model[m - 1].append(
            Difference(
                measure=measure.name,
                unit=measure.unit,
                first=measure.values[0],
                second=measure.values[m],
                difference=gap.value,
                low=gap.low,
                high=gap.high,
                p=p,
                adjusted=differs,
                equivalence=same,
                margin=measure.margin,
                verdict=verdict,
                gained=counts and counts[0],
                lost=counts and counts[1],
                images_needed=images_needed(len(labels), gap, measure.margin, alpha / len(tests))
                if verdict == "not decided"
                else None,
            )
        )
    return by_model


def _counts(right: list[np.ndarray] | None, m: int) -> tuple[int, int] | None:
    if right is None:
        return None
    return int((right[m] & ~right[0]).sum()), int((right[0] & ~right[m]).sum())


def _verdict(gain: float, differs: float, same: float, alpha: float) -> Verdict:
    if same <= alpha:
        return "equivalent"
    if differs <= alpha and gain != 0:
        return "better" if gain > 0 else "worse"
    return "not decided"


def _changes(
    predicted: Sequence[Integers], likelihoods: Sequence[Floats], labels: Integers, m: int, names: Sequence[str]
) -> Changes:
    before, after = predicted[0] == labels, predicted[m] == labels
    gained, lost = np.flatnonzero(after & ~before), np.flatnonzero(before & ~after)
    change = likelihoods[m] - likelihoods[0]
    n = len(names)
    seen, up, down = (np.bincount(labels[rows], minlength=n) for rows in (slice(None), gained, lost))
    moved = np.flatnonzero(up + down)
    order = moved[np.argsort(-np.abs(up - down)[moved], kind="stable")]
    rows = [
        {"class": names[c], "images": int(seen[c]), "gained": int(up[c]), "lost": int(down[c])} for c in order.tolist()
    ]
    return Changes(
        gained[np.argsort(-change[gained], kind="stable")], lost[np.argsort(change[lost], kind="stable")], rows
    )
