"""Cross-entropy against losses with a bonus for well-classified samples: Zhao et al. 2022."""

from collections.abc import Sequence
from typing import Any

from topk_studies.engine import training
from topk_studies.engine.settings import RATES, trials
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record
from topk_studies.engine.tuning import Choice, choices, tuned_runs
from topk_studies.report.display import (
    commands,
    differences_table,
    judge_pair,
    list_table,
    protocol,
    spelt,
    trials_table,
)

TITLE = "Encouraging losses"
QUESTION = "Does a bonus for samples that are classified well already raise accuracy?"
REFERENCE = "Zhao et al. 2022"
RUNS, VERSION, ALONE = training.RUNS, training.VERSION, False

BASELINE = "ce"
# the loss and its fixed options
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (BASELINE, {}),
    ("encouraging", {"log_end": 0.75}),
    ("encouraging", {"log_end": 1.0}),
    ("sigmoid_mse", {}),
    ("mirror", {"base": "mse"}),
    ("mirror", {"link": "softmax", "rho": 0.0}),
    ("mirror", {"link": "softmax"}),
)
SEEDS = (0, 1)

run = training.run


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    wanted = VARIANTS if options.losses is None else [(loss, {}) for loss in options.losses]
    return [
        configuration
        for loss, fixed in wanted
        for configuration in tuned_runs(
            options, known, loss, options.seeds or SEEDS, {"loss_opt": fixed}, metric="top1", grid=_grid(options, loss)
        )
    ]


def _grid(options: Options, loss: str) -> Sequence[Any]:
    """Four rates, whatever the loss: here its options are what is compared."""
    return trials(options, loss) if options.budget == "paper" or options.losses else [{"lr": lr} for lr in RATES]


def report(records: Sequence[Record]) -> Findings:
    found = choices(records, metric="top1", tuned=("lr",))
    data = found[0].flags.get("dataset", "") if found else ""
    return Findings(
        tables=(
            list_table("Accuracy with and without a bonus", found, ("top1", "top5"), REFERENCE, name=named),
            differences_table(found, "data", lambda choice: data, ("top1", "top5"), name=named),
            trials_table(found, "data", lambda choice: data, "top1", name=named),
        ),
        notes=tuple(_notes(found)),
        protocol=protocol(found, "top1"),
        commands=commands("encouraging", records),
    )


def named(choice: Choice) -> str:
    return " ".join(filter(None, [choice.loss, spelt(choice.flags.get("loss_opt", {}))]))


def _notes(found: Sequence[Choice]) -> list[Note]:
    notes: list[Note] = []
    for choice in found:
        if choice.loss == "encouraging":
            claim = "A bonus on top of cross-entropy raises accuracy (Zhao et al.)."
            notes += judge_pair(claim, found, named(choice), BASELINE, "top1", name=named)
    claim = "The mirror bonus raises the accuracy of the squared error (Zhao et al.)."
    for with_bonus, without in (
        ("mirror base=mse", "sigmoid_mse"),
        ("mirror link=softmax", "mirror link=softmax rho=0"),
    ):
        notes += judge_pair(claim, found, with_bonus, without, "top1", name=named)
    return notes
