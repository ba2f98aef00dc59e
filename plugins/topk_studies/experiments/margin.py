"""The margin of the smooth top-k SVM: Berrada et al. 2018, Tables 7 and 8."""

from collections.abc import Sequence

from topk_studies.engine import training
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record
from topk_studies.engine.tuning import Choice, groups, label_noise_of
from topk_studies.engine.variants import option_of, variant_runs, variants
from topk_studies.report.display import commands, grid_table, judge_pair, lines_figure, protocol

TITLE = "Margin"
QUESTION = "Does the smooth top-5 SVM need its margin, and how large a one?"
REFERENCE = "Berrada et al. 2018, Tables 7 and 8"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

LOSSES = ("smooth_topk_svm",)
WITHOUT = "topk_nll"  # the same loss at alpha = 0
VALUES = {"small": (1.0, 10.0), "paper": (0.1, 1.0, 10.0, 100.0)}
TAU = {"small": 0.1, "paper": 1.0}
LEVELS = {"small": (0.0, 0.8), "paper": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}
SEEDS = (0, 1, 2)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    seeds, tau = options.seeds or SEEDS, TAU[options.budget]
    wanted: list[Configuration] = []
    for level in LEVELS[options.budget]:
        wanted += variant_runs(options, WITHOUT, {"tau": tau}, seeds, {"label_noise": level})
        for loss in options.losses or LOSSES:
            for alpha in VALUES[options.budget]:
                margin = {} if alpha == 1.0 else {"alpha": alpha}  # the default left out is a run that others share
                wanted += variant_runs(options, loss, {"tau": tau, **margin}, seeds, {"label_noise": level})
    return wanted


def report(records: Sequence[Record]) -> Findings:
    found = variants(records)
    return Findings(
        tables=(
            grid_table("Accuracy by margin", "noise", label_noise_of, found, "top5", REFERENCE, name=named),
            grid_table("Accuracy by margin", "noise", label_noise_of, found, "top1", REFERENCE, name=named),
        ),
        figures=(
            lines_figure(
                "Top-5 accuracy against the margin",
                "alpha",
                alpha_of,
                found,
                "top5",
                name=lambda choice: f"noise {label_noise_of(choice):g}",
            ),
        ),
        notes=tuple(_notes(found)),
        protocol=protocol(found) + " alpha = 0 is topk_nll.",
        commands=commands("margin", records),
    )


def alpha_of(choice: Choice) -> float:
    return 0.0 if choice.loss == WITHOUT else option_of(choice, "alpha", 1.0)


def named(choice: Choice) -> str:
    return (
        f"alpha = {alpha_of(choice):g}" if choice.loss in (*LOSSES, WITHOUT) else f"{choice.loss} {alpha_of(choice):g}"
    )


def _notes(found: Sequence[Choice]) -> list[Note]:
    notes: list[Note] = []
    for level, here in groups(found, label_noise_of).items():
        claim = "The margin helps: alpha = 1 beats alpha = 0 in top-5 (Berrada, Table 8)."
        notes += judge_pair(claim, here, "alpha = 1", "alpha = 0", "top5", name=named, where=f"noise {level:g}")
    return notes
