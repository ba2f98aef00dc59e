"""The temperature of the smooth top-k SVM: Berrada et al. 2018, Table 6 and Figure 2."""

from collections.abc import Sequence

from topk_studies.engine import training
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

TITLE = "Temperature"
QUESTION = "How does the temperature of the smooth top-5 SVM change what is learned, and how many scores learn from it?"
REFERENCE = "Berrada et al. 2018, Table 6 and Figure 2"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

LOSSES = ("smooth_topk_svm",)
LIMIT = "topk_svm"  # what the smooth loss is at tau = 0
VALUES = {"small": (0.01, 0.1, 0.3, 1.0, 10.0), "paper": (0.01, 0.1, 1.0, 10.0, 100.0)}
SEEDS = (0, 1, 2)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    seeds = options.seeds or SEEDS
    smooth = [
        configuration
        for loss in options.losses or LOSSES
        for tau in VALUES[options.budget]
        for configuration in variant_runs(options, loss, {"tau": tau}, seeds)
    ]
    return variant_runs(options, LIMIT, {}, seeds) + smooth


def report(records: Sequence[Record]) -> Findings:
    found = sorted(variants(records), key=tau_of)
    smooth = [choice for choice in found if choice.loss != LIMIT]
    return Findings(
        tables=(
            grid_table(
                "Accuracy by temperature", "tau", tau_of, found, "top5", REFERENCE, name=smoothed, note=LIMIT_NOTE
            ),
            grid_table(
                "Accuracy by temperature", "tau", tau_of, found, "top1", REFERENCE, name=smoothed, note=LIMIT_NOTE
            ),
        ),
        figures=(
            lines_figure("Top-5 accuracy against temperature", "tau", tau_of, smooth, "top5", log=True),
            curves_figure(
                "Training at several temperatures",
                "Accuracy on the training batches and on the validation split, and the share of the scores whose "
                "gradient is not zero; first seed.",
                first_runs(found, named),
                (
                    ("train_top5", "training top-5 (%)"),
                    ("top5", "validation top-5 (%)"),
                    ("nonzero", "gradient not zero"),
                ),
                log=("nonzero",),
            ),
        ),
        notes=tuple(_notes(found)),
        protocol=protocol(found),
        commands=commands("temperature", records),
    )


LIMIT_NOTE = "tau = 0 is topk_svm, the loss that is smoothed."


def tau_of(choice: Choice) -> float:
    return 0.0 if choice.loss == LIMIT else option_of(choice, "tau", 1.0)


def smoothed(choice: Choice) -> str:
    """The loss, at tau = 0 too."""
    return LOSSES[0] if choice.loss == LIMIT else choice.loss


def named(choice: Choice) -> str:
    return f"{choice.loss} tau={tau_of(choice):g}"


def _notes(found: Sequence[Choice]) -> list[Note]:
    middle = [choice for choice in found if tau_of(choice) == 0.1]
    if not middle:
        return []
    base = named(middle[0])
    notes = judge_pair(
        "Without smoothing a deep network does not learn well: the gradient is too sparse (Berrada, Figure 2).",
        found,
        base,
        named(found[0]),
        "top5",
        name=named,
    )
    return notes + judge_pair(
        "Very high temperatures cost accuracy (Berrada, Table 6).", found, base, named(found[-1]), "top5", name=named
    )
