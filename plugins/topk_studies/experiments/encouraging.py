"""Cross-entropy against losses with a bonus for well-classified samples: Zhao et al. 2022."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.settings import RATES, Trial, trials
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Options, Table
from topk_studies.engine.tuning import Choice
from topk_studies.report.display import list_table, spelt

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


class Encouraging(TunedStudy):
    NAME = "encouraging"
    TITLE = "Encouraging losses"
    QUESTION = "Does a bonus for samples that are classified well already raise accuracy?"
    REFERENCE = "Zhao et al. 2022"
    METRIC = "top1"
    METRICS = ("top1", "top5")
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "data"
    TUNED = ("lr",)

    def settings(self, options: Options) -> list[dict[str, Any]]:
        return [{}]

    def contestants(self, options: Options) -> Sequence[tuple[str, Mapping[str, Any]]]:
        return VARIANTS if options.losses is None else super().contestants(options)

    def trials(self, options: Options, loss: str) -> Sequence[Trial]:
        """Four rates, whatever the loss: here its options are what is compared."""
        named = options.budget == "paper" or options.losses
        return trials(options, loss) if named else [{"lr": lr} for lr in RATES]

    def key(self, choice: Choice) -> str:
        return choice.flags.get("dataset", "")

    def name(self, choice: Choice) -> str:
        return " ".join(filter(None, [choice.loss, spelt(choice.flags.get("loss_opt", {}))]))

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        title = "Accuracy with and without a bonus"
        main = list_table(title, all_choices, self.METRICS, self.REFERENCE, name=self.name)
        return (main, *self.tuning_tables(all_choices))

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        claims: list[Claim] = []
        for choice in all_choices:
            if choice.loss == "encouraging":
                text = "A bonus on top of cross-entropy raises accuracy (Zhao et al.)."
                claims += self.pair(text, all_choices, self.name(choice), BASELINE)
        text = "The mirror bonus raises the accuracy of the squared error (Zhao et al.)."
        for with_bonus, without in (
            ("mirror base=mse", "sigmoid_mse"),
            ("mirror link=softmax", "mirror link=softmax rho=0"),
        ):
            claims += self.pair(text, all_choices, with_bonus, without)
        return claims


STUDY = Encouraging()
