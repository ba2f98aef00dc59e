"""Accuracy on subsets of the training data: Berrada et al. 2018, Table 2."""

from collections.abc import Sequence
from dataclasses import replace

from topk_studies.engine import training
from topk_studies.engine.settings import base_flags
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record
from topk_studies.engine.tuning import Choice, choices, groups, tuned_runs
from topk_studies.report.display import (
    commands,
    differences_table,
    grid_table,
    judge_pair,
    lines_figure,
    protocol,
    trials_table,
)

TITLE = "Little data"
QUESTION = "Does a top-k loss gain on cross-entropy where there are fewer training images?"
REFERENCE = "Berrada et al. 2018, Table 2 (ImageNet subsets)"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

LOSSES = ("ce", "smooth_topk_svm")
SHARES = {"small": (0.25, 1.0), "paper": (0.05, 0.1, 0.25, 0.5, 1.0)}
SEEDS = (0, 1, 2)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    return [
        configuration
        for share in SHARES[options.budget]
        for loss in options.losses or LOSSES
        for configuration in tuned_runs(
            _stretched(options, share), known, loss, options.seeds or SEEDS, {"subset": share}
        )
    ]


def _stretched(options: Options, share: float) -> Options:
    """As many updates and evaluations on a subset as on the whole."""
    longer = round(1 / share)
    if longer == 1:
        return options
    epochs = options.flags.get("epochs") or base_flags(options)["epochs"]
    return replace(options, flags={**options.flags, "epochs": longer * epochs, "val_interval": longer})


def report(records: Sequence[Record]) -> Findings:
    found = choices(records)
    return Findings(
        tables=(
            grid_table("Accuracy by share of the data", "share", share_of, found, "top5", REFERENCE),
            grid_table("Accuracy by share of the data", "share", share_of, found, "top1", REFERENCE),
            differences_table(found, "share", share_of, ("top5", "top1")),
            trials_table(found, "share", share_of, "top5"),
        ),
        figures=(
            lines_figure(
                "Top-5 accuracy against data", "share of the training images", share_of, found, "top5", log=True
            ),
        ),
        notes=tuple(_notes(found)),
        protocol=protocol(found) + " A subset is trained on for as many updates as the whole.",
        commands=commands("small-data", records),
    )


def share_of(choice: Choice) -> float:
    return choice.flags.get("subset", 1.0)


def _notes(found: Sequence[Choice]) -> list[Note]:
    notes: list[Note] = []
    for share, here in groups(found, share_of).items():
        if share < 1:
            claim = "With little data the smooth top-5 SVM beats cross-entropy in top-5 (Berrada, Table 2)."
            notes += judge_pair(claim, here, "smooth_topk_svm", "ce", "top5", where=f"{share:g} of the data")
    return notes
