"""Small prediction sets: losses that train for their size, beside those that train for accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.settings import MIDDLE, Trial, grid
from topk_studies.engine.statistics import Claim, paired
from topk_studies.engine.study import Configuration, Options, Record, Table
from topk_studies.engine.tuning import Choice
from topk_studies.report.display import trials_table

BASELINE, FOCAL, SMOOTH = "ce", "focal", "smooth_topk_svm"
CONFORMAL, AVERAGED = "conformal_training", "conformal_training_low_variance"
SIZE = "set_mean_size"
EFFECT = 0.2  # classes: the smallest difference of set sizes that matters
CLAIMS = (  # whose sets are claimed to be smaller, than whose
    (CONFORMAL, BASELINE, "Training for sets makes them smaller than cross-entropy does (Stutz et al. 2022)."),
    (
        AVERAGED,
        BASELINE,
        "With a quantile of less variance sets are smaller than cross-entropy's (Noorani et al. 2025).",
    ),
    (AVERAGED, CONFORMAL, "A quantile of less variance makes sets smaller (Noorani et al. 2025)."),
    (CONFORMAL, FOCAL, "Training for sets makes them smaller than the focal loss does."),
    (CONFORMAL, SMOOTH, "Training for sets makes them smaller than the smooth top-5 SVM does."),
)
# Of the losses that train for sets: two rates for each of two weights of cross-entropy beside them. Without it they
# would have to begin with weights that are trained already: at first all sets are alike.
OWN: tuple[Trial, ...] = grid("cross_entropy_weight", 1.0, 10.0, rates=MIDDLE)


class SmallSets(TunedStudy):
    NAME = "small-sets"
    TITLE = "Small prediction sets"
    QUESTION = "Which loss has the smallest prediction sets that hold the label nine times in ten?"
    REFERENCE = "Stutz et al. 2022; Noorani et al. 2025"
    LOSSES = (BASELINE, FOCAL, SMOOTH, CONFORMAL, AVERAGED)
    METRIC = SIZE
    METRICS = (SIZE, "top5", "top1")
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "data"
    PROTOCOL = (
        "Sets are those of split conformal prediction by the label's probability (score lac): half of the split "
        "calibrates them, the other half is measured; which half is which changes with the seed, and is the same for "
        "all losses."
    )

    def settings(self, options: Options) -> Sequence[Mapping[str, Any]]:
        return [{}]

    def trials(self, options: Options, loss: str) -> Sequence[Trial] | None:
        return OWN if loss in (CONFORMAL, AVERAGED) and options.budget != "paper" else None

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        """The tuned runs, which measure prediction sets on the validation split, too."""
        plain = [replace(record, configuration=_without_sets(record.configuration)) for record in known]
        return [{**configuration, "sets": True} for configuration in super().wanted(options, plain, seeds)]

    def key(self, choice: Choice) -> str:
        return choice.flags.get("dataset") or choice.flags.get("data_dir", "")

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        return (_sizes(all_choices), trials_table(all_choices, self.KEY, self.key, self.METRIC, name=self.name))

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        """Differences of sizes, the larger less the smaller as they are claimed: above 0 the claim holds."""
        place = {choice.loss: choice for choice in all_choices}
        return [
            Claim(
                text,
                paired(place[larger].scores(self.METRIC), place[smaller].scores(self.METRIC)),
                f"set size of {larger} less {smaller}",
                (place[larger], place[smaller]),
                effect=EFFECT,
                unit="classes",
            )
            for smaller, larger, text in CLAIMS
            if smaller in place and larger in place
        ]


def _without_sets(configuration: Configuration) -> Configuration:
    return {name: value for name, value in configuration.items() if name != "sets"}


def _sizes(choices: Sequence[Choice]) -> Table:
    """Sizes and coverage of the sets, and accuracies, each at the epoch that is best for it."""
    rows = [
        (
            choice.loss,
            choice.estimate(SIZE),
            choice.estimate("set_coverage", by=SIZE),
            choice.estimate("top5"),
            choice.estimate("top1"),
        )
        for choice in choices
    ]
    return Table(
        "Prediction sets",
        ("", "set size", "coverage", "top-5", "top-1"),
        tuple(rows),
        "Mean number of classes in a set, and percent of sets that hold the label, where nine in ten were asked for; "
        "accuracies in percent. Test split, mean over seeds ± its 95 % interval.",
        compared=("set size",),
        best="min",
    )


STUDY = SmallSets()
