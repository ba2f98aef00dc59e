"""Macro top-k accuracy on a long tail: Garcin et al. 2022, Tables 5, 6 and 8."""

from collections.abc import Sequence

from topk_studies.engine import training
from topk_studies.engine.settings import BUILT_IN, IMAGENET, base_flags
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record
from topk_studies.engine.tuning import Choice, choices, tuned_runs
from topk_studies.report.display import commands, differences_table, judge_pair, list_table, protocol, trials_table

TITLE = "Imbalance"
QUESTION = "Which loss finds the rare classes of a long tail among its five guesses?"
REFERENCE = "Garcin et al. 2022, Tables 5, 6 and 8 (Pl@ntNet-300K, ImageNet-LT)"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

LOSSES = ("ce", "focal", "ldam", "smooth_topk_svm", "noised_topk", "noised_topk_imbalanced")
METRICS = ("macro_top5", "many_top5", "medium_top5", "few_top5", "macro_top1")
TAIL = {"long_tail": "exp", "imbalance_factor": 100.0}  # as CIFAR-100-LT
IMAGENET_TAIL = {"long_tail": "pareto", "imbalance_factor": 256.0}  # as ImageNet-LT
SEEDS = (0, 1)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    return [
        configuration
        for loss in options.losses or LOSSES
        for configuration in tuned_runs(
            options, known, loss, options.seeds or SEEDS, _data(options), metric="macro_top5"
        )
    ]


def _data(options: Options) -> dict[str, object]:
    """The tail; of the built-in set with enough images that its frequent classes have more than a hundred."""
    base = base_flags(options)
    if base.get("dataset") == BUILT_IN:
        return {**TAIL, "dataset_opt": {"size": 20_000, "eval_size": 2000}}
    return IMAGENET_TAIL if base is IMAGENET else TAIL


def report(records: Sequence[Record]) -> Findings:
    found = choices(records, metric="macro_top5")
    measured = [metric for metric in METRICS if _has(records, metric)]
    return Findings(
        tables=(
            list_table("Accuracy on a long tail", found, measured, REFERENCE, note=GROUPS),
            differences_table(found, "tail", lambda choice: choice.flags["imbalance_factor"], measured),
            trials_table(found, "tail", lambda choice: choice.flags["imbalance_factor"], "macro_top5"),
        ),
        notes=tuple(_notes(found)),
        protocol=protocol(found, "macro_top5"),
        commands=commands("imbalance", records),
    )


GROUPS = "Many: classes of more than 100 training images; medium: 20 to 100; few: fewer than 20."


def _has(records: Sequence[Record], metric: str) -> bool:
    return any(f"test_{metric}" in row for record in records for row in record.result["history"])


def _notes(found: Sequence[Choice]) -> list[Note]:
    claims = (
        ("The imbalanced noised loss beats all others in macro top-5 (Garcin, Table 5).", "macro_top5"),
        ("What it gains, it gains on the classes with few images (Garcin, Table 8).", "few_top5"),
    )
    return [
        note
        for claim, metric in claims
        for other in LOSSES
        if other != "noised_topk_imbalanced" and (metric == "macro_top5" or other == "ce")
        for note in judge_pair(claim, found, "noised_topk_imbalanced", other, metric)
    ]
