"""The noise of the noised top-k loss: Garcin et al. 2022, Tables 2 and 3, Figure 2."""

from collections.abc import Sequence
from itertools import pairwise

from topk_studies.engine import training
from topk_studies.engine.statistics import difference
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record
from topk_studies.engine.tuning import Choice
from topk_studies.engine.variants import option_of, variant_runs, variants
from topk_studies.report.display import (
    commands,
    curves_figure,
    first_runs,
    grid_table,
    judge_pair,
    lines_figure,
    protocol,
)

TITLE = "Noise parameter"
QUESTION = "How do the noise's deviation epsilon and the number of draws B change the noised loss and its gradient?"
REFERENCE = "Garcin et al. 2022, Tables 2 and 3, Figure 2"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

LOSSES = ("noised_topk",)
EPSILONS = (0.0, 0.1, 1.0, 10.0, 100.0)
DRAWS = (1, 5, 50)
EPSILON, DRAW = 1.0, 5
SLIGHT = 2.0  # points of accuracy
SEEDS = (0, 1)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    points = [(epsilon, DRAW) for epsilon in EPSILONS] + [(EPSILON, draws) for draws in DRAWS]
    return [
        configuration
        for loss in options.losses or LOSSES
        for epsilon, draws in points
        for configuration in variant_runs(
            options, loss, {"epsilon": epsilon, "num_samples": draws}, options.seeds or SEEDS
        )
    ]


def report(records: Sequence[Record]) -> Findings:
    found = variants(records)
    by_epsilon = sorted((choice for choice in found if draws_of(choice) == DRAW), key=epsilon_of)
    by_draws = sorted((choice for choice in found if epsilon_of(choice) == EPSILON), key=draws_of)
    return Findings(
        tables=tuple(
            grid_table(title, name, key, some, metric, REFERENCE)
            for title, name, key, some in (
                (f"Accuracy by epsilon, B = {DRAW}", "epsilon", epsilon_of, by_epsilon),
                (f"Accuracy by draws, epsilon = {EPSILON:g}", "B", draws_of, by_draws),
            )
            for metric in ("top5", "top1")
        ),
        figures=(
            lines_figure(
                "Top-5 accuracy against epsilon",
                "epsilon",
                epsilon_of,
                [choice for choice in by_epsilon if epsilon_of(choice)],
                "top5",
                log=True,
            ),
            curves_figure(
                "Gradient sparsity",
                "Share of the scores whose gradient is not zero, and accuracy, at several epsilon; "
                f"B = {DRAW}, first seed. Samples beyond the hinge have no gradient, whatever epsilon.",
                first_runs(by_epsilon, lambda choice: f"epsilon={epsilon_of(choice):g}"),
                (
                    ("nonzero", "gradient not zero"),
                    ("train_top5", "training top-5 (%)"),
                    ("top5", "validation top-5 (%)"),
                ),
                log=("nonzero",),
            ),
        ),
        notes=tuple(_notes(by_epsilon, by_draws)),
        protocol=protocol(found) + " epsilon = 0 is the calibrated hinge.",
        commands=commands("noise-parameter", records),
    )


def epsilon_of(choice: Choice) -> float:
    return option_of(choice, "epsilon", EPSILON)


def draws_of(choice: Choice) -> int:
    return option_of(choice, "num_samples", DRAW)


def _notes(by_epsilon: Sequence[Choice], by_draws: Sequence[Choice]) -> list[Note]:
    notes = judge_pair(
        "Too little noise does not learn well: the gradient is too sparse (Garcin, Table 2).",
        by_epsilon,
        "epsilon = 1",
        "epsilon = 0",
        "top5",
        name=_epsilon,
    )
    notes += judge_pair(
        "Too much noise does not learn well either (Garcin, Table 2).",
        by_epsilon,
        "epsilon = 1",
        f"epsilon = {EPSILONS[-1]:g}",
        "top5",
        name=_epsilon,
    )
    return notes + _sparsity(by_epsilon) + _flat(by_draws)


def _epsilon(choice: Choice) -> str:
    return f"epsilon = {epsilon_of(choice):g}"


def _sparsity(by_epsilon: Sequence[Choice]) -> list[Note]:
    """Whether the first epoch's gradient gets denser with each larger epsilon."""
    shares = [
        (epsilon_of(choice), [record.result["history"][0]["nonzero"] for record in choice.runs.values()])
        for choice in by_epsilon
    ]
    if len(shares) < 2:
        return []
    means = [sum(values) / len(values) for _, values in shares]
    # from there on B draws touch B + 1 scores at most, and the shares differ by how many samples are beyond the hinge
    rising = means[0] < means[-1] and all(b > 0.95 * a for a, b in pairwise(means))
    told = ", ".join(f"{mean:.3g} at {epsilon:g}" for (epsilon, _), mean in zip(shares, means, strict=True))
    claim = "The gradient gets denser as epsilon grows (Garcin, Figure 2)."
    limit = f"B = {DRAW} draws and the label touch {DRAW + 1} scores of a sample at most"
    return [Note(claim, "agrees" if rising else "differs", f"share not zero in the first epoch: {told}; {limit}")]


def _flat(by_draws: Sequence[Choice]) -> list[Note]:
    """Whether the best and the worst B are, seed by seed, surely within two points of each other."""
    means = {draws_of(choice): value.mean for choice in by_draws if (value := choice.estimate("top5")) is not None}
    if len(means) < 2:
        return []
    scores = {draws_of(choice): choice.scores("top5") for choice in by_draws}
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    gap = difference(scores[high], scores[low])
    assert gap is not None
    verdict = "agrees" if gap.high < SLIGHT else "differs" if gap.low > SLIGHT else "open"
    claim = "The number of draws matters little: B = 5 is enough (Garcin, Table 3)."
    told = f"top-5 of the best, B = {high}, less the worst, B = {low}: {gap} points ({gap.count} seeds)"
    return [Note(claim, verdict, told)]
