"""The temperature of the smooth top-k SVM: Berrada et al. 2018, Table 6 and Figure 2."""

from collections.abc import Sequence
from typing import Any

from topk_studies.baselines.paper import TEMPERATURE, less
from topk_studies.engine.experiment import VariantStudy
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Figure, Options, Record, Table
from topk_studies.engine.tuning import Choice
from topk_studies.engine.variants import option_of
from topk_studies.report.display import TRAINING_PANELS, curves_figure, first_runs

SMOOTH = "smooth_topk_svm"
LIMIT = "topk_svm"  # the smooth loss at tau = 0
VALUES = {
    "small": (0.01, 0.1, 0.3, 1.0, 10.0),
    "standard": (0.01, 0.1, 0.3, 1.0, 10.0, 100.0),
    "paper": (0.01, 0.1, 1.0, 10.0, 100.0),
}


class Temperature(VariantStudy):
    NAME = "temperature"
    TITLE = "Temperature"
    QUESTION = (
        "How does the temperature of the smooth top-5 SVM change what is learned, and how many scores learn from it?"
    )
    REFERENCE = "Berrada et al. 2018, Table 6 and Figure 2"
    LOSSES = (SMOOTH,)
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "tau"

    def points(self, options: Options) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        smooth = [(loss, {"tau": tau}, {}) for loss in options.losses or self.LOSSES for tau in VALUES[options.budget]]
        return [(LIMIT, {}, {}), *smooth]

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        return sorted(super().choices(records), key=self.key)

    def key(self, choice: Choice) -> float:
        return 0.0 if choice.loss == LIMIT else option_of(choice, "tau", 1.0)

    def name(self, choice: Choice) -> str:
        """The loss; the limit counts as the loss that tends to it."""
        return SMOOTH if choice.loss == LIMIT else choice.loss

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        note = f"tau = 0 is {LIMIT}, the loss that is smoothed."
        return tuple(
            self.grid_table("Accuracy by temperature", all_choices, metric, note=note) for metric in self.METRICS
        )

    def figures(self, all_choices: Sequence[Choice]) -> tuple[Figure, ...]:
        smooth = [choice for choice in all_choices if choice.loss != LIMIT]
        return (
            self.lines("Top-5 accuracy against temperature", smooth, log=True),
            curves_figure(
                "Training at several temperatures",
                "Accuracy on the training batches and on the validation split, and the share of the scores whose "
                "gradient is not zero; first seed.",
                first_runs(all_choices, lambda choice: f"{choice.loss} tau={self.key(choice):g}"),
                TRAINING_PANELS,
                log=("nonzero",),
            ),
        )

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        mine = {self.key(choice): choice for choice in all_choices if self.name(choice) == SMOOTH}
        if 0.1 not in mine:
            return []
        texts = {
            min(mine): "Without smoothing a deep network does not learn well: the gradient is too sparse "
            "(Berrada, Figure 2).",
            max(mine): "Very high temperatures cost accuracy (Berrada, Table 6).",
        }
        return [
            self.versus(text, mine[0.1], mine[tau], f"{SMOOTH} tau=0.1", f"tau={tau:g}", paper=_paper(tau))
            for tau, text in texts.items()
        ]


def _paper(tau: float) -> float | None:
    """How much better the paper's network is at tau = 0.1."""
    return less(TEMPERATURE.get((0.1, SMOOTH)), TEMPERATURE.get((tau, SMOOTH)))


STUDY = Temperature()
