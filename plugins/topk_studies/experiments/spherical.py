"""Spherical losses with few and with many classes: de Brebisson, Vincent 2016, section 5."""

from collections.abc import Sequence
from typing import Any

from topk_studies.baselines.paper import SPHERICAL
from topk_studies.engine import training
from topk_studies.engine.settings import BUILT_IN, base_flags
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

TITLE = "Spherical losses"
QUESTION = "Do the spherical alternatives to softmax win with few classes, and lose with many?"
REFERENCE = "de Brebisson, Vincent 2016, section 5 (MNIST, CIFAR-10, CIFAR-100, Penn Treebank)"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

LOSSES = ("ce", "log_taylor_softmax", "log_spherical_softmax")
# superclasses x fine classes of the built-in set; the default, 20 x 5, is what other studies train on
SIZES: dict[int, dict[str, Any]] = {
    10: {"dataset_opt": {"superclasses": 2, "fine": 5}},
    100: {},
}
SEEDS = (0, 1)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    return [
        configuration
        for flags in _data(options)
        for loss in options.losses or LOSSES
        for configuration in tuned_runs(options, known, loss, options.seeds or SEEDS, flags, metric="top1")
    ]


def _data(options: Options) -> list[dict[str, Any]]:
    """Data sets of several numbers of classes: of the built-in set's, CIFAR's two, or the one that is named."""
    base = base_flags(options)
    if base.get("dataset") == BUILT_IN:
        return list(SIZES.values())
    if base.get("dataset") == "torch/cifar100" and not options.flags.get("dataset"):
        return [{"dataset": "torch/cifar10", "num_classes": 10}, {}]
    return [{}]


def report(records: Sequence[Record]) -> Findings:
    found = choices(records, metric="top1")
    return Findings(
        tables=(
            grid_table(
                "Accuracy by classes", "classes", classes_of, found, "top1", REFERENCE, paper=SPHERICAL, note=SOURCE
            ),
            differences_table(found, "classes", classes_of, ("top1", "top5")),
            trials_table(found, "classes", classes_of, "top1"),
        ),
        figures=(lines_figure("Top-1 against classes", "classes", classes_of, found, "top1", log=True),),
        notes=tuple(_notes(found)),
        protocol=protocol(found, "top1"),
        commands=commands("spherical", records),
    )


SOURCE = (
    "The paper's columns are its accuracies on CIFAR-10 and CIFAR-100, with its own networks, as quoted in "
    "F. Sobolevsky's summary of it."
)


def classes_of(choice: Choice) -> int:
    named = choice.flags.get("dataset_opt", {})
    if "superclasses" in named:
        return named["superclasses"] * named["fine"]
    return choice.flags.get("num_classes", 100)


def _notes(found: Sequence[Choice]) -> list[Note]:
    notes: list[Note] = []
    sizes = groups(found, classes_of)
    for loss in dict.fromkeys(choice.loss for choice in found if choice.loss != "ce"):
        for size, here in sorted(sizes.items()):
            where = f"{size} classes"
            if size <= 10:
                notes += judge_pair(
                    "With few classes the spherical losses beat softmax.", here, loss, "ce", "top1", where=where
                )
            else:
                notes += judge_pair("With many classes softmax beats them.", here, "ce", loss, "top1", where=where)
    return notes
