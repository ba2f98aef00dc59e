"""What helps rare classes: to weigh them, to draw them more often, or a loss that knows their frequencies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.settings import MIDDLE, RATES, TRIALS, Trial
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Configuration, Options, Record, Table
from topk_studies.engine.tuning import TUNED, TUNING_SEED, Choice, choices, tuned_runs
from topk_studies.experiments.imbalance import STUDY as IMBALANCE
from topk_studies.report.display import differences_table, list_table, trials_table

PLAIN = "cross-entropy"
WEIGHTED = "topk_nll"  # at k = 1 it is cross-entropy that takes weights
ONE: Trial = {"loss_opt": {"k": 1}}


def _tried(flag: str, *values: float) -> tuple[Trial, ...]:
    """Two rates for each value of a flag: as many trials as those of a way without one."""
    return tuple({"lr": lr, flag: value} for value in values for lr in MIDDLE)


@dataclass(frozen=True)
class Way:
    """A way to make rare classes count.

    Args:
        loss: the loss.
        flags: what is fixed.
        trials: what tuning chooses from.
    """

    loss: str = "ce"
    flags: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[Trial] = tuple({"lr": lr} for lr in RATES)


ADJUSTED = tuple({"lr": lr, "loss_opt": {"tau": tau}} for tau in (0.5, 1.0) for lr in MIDDLE)
WAYS = {
    PLAIN: Way(),
    "weights inv_freq": Way(WEIGHTED, {"class_weight": "inv_freq", **ONE}, _tried("loss_weight_power", 0.5, 1.0)),
    "weights effective_num": Way(
        WEIGHTED, {"class_weight": "effective_num", **ONE}, _tried("loss_weight_beta", 0.9, 0.99)
    ),
    "sampler class_balanced": Way(flags={"sampler": "class_balanced"}),
    "sampler sqrt": Way(flags={"sampler": "sqrt"}),
    "sampler effective_num": Way(flags={"sampler": "effective_num"}, trials=_tried("sampler_beta", 0.9, 0.99)),
    "sampler repeat_factor": Way(flags={"sampler": "repeat_factor"}, trials=_tried("sampler_threshold", 0.01, 0.03)),
    "logit_adjustment": Way("logit_adjustment", trials=ADJUSTED),
    "ldam": Way("ldam", trials=TRIALS["ldam"]),
    "noised_topk_imbalanced": Way("noised_topk_imbalanced", trials=TRIALS["noised_topk_imbalanced"]),
}
COMPARED = (  # which is expected to be ahead, of which
    ("weights inv_freq", PLAIN),
    ("weights effective_num", PLAIN),
    ("sampler class_balanced", PLAIN),
    ("sampler sqrt", PLAIN),
    ("sampler repeat_factor", PLAIN),
    ("logit_adjustment", PLAIN),
    ("noised_topk_imbalanced", PLAIN),
    ("sampler class_balanced", "weights inv_freq"),
    ("logit_adjustment", "weights inv_freq"),
    ("logit_adjustment", "sampler class_balanced"),
)
OWN_FLAGS = ("loss_weight_power", "loss_weight_beta", "sampler_beta", "sampler_threshold")


class RareClasses(TrainingStudy):
    NAME = "rare-classes"
    TITLE = "Rare classes"
    QUESTION = (
        "What helps rare classes: to weigh them, to draw them more often, or a loss that knows their frequencies?"
    )
    REFERENCE = (
        "no paper's table: Cui et al. 2019, Kang et al. 2020, Menon et al. 2021, Garcin et al. 2022 propose the ways"
    )
    METRIC = "macro_top5"
    METRICS = ("macro_top5", "macro_top1", "many_top5", "medium_top5", "few_top5")
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "tail"
    TUNED = (*TUNED, *OWN_FLAGS)

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        tuning = None if options.max_seeds is None else TUNING_SEED
        return [
            configuration
            for tail in IMBALANCE.settings(options)
            for way in WAYS.values()
            if options.losses is None or way.loss in options.losses
            for configuration in tuned_runs(
                options,
                known,
                way.loss,
                seeds,
                {**tail, **way.flags},
                metric=self.METRIC,
                grid=way.trials,
                tuning_seed=tuning,
            )
        ]

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        return choices(records, metric=self.METRIC, tuned=self.TUNED)

    def key(self, choice: Choice) -> float:
        return IMBALANCE.key(choice)

    def name(self, choice: Choice) -> str:
        """The way that a setting is; a loss's name where it is none of them."""
        asked = {name: choice.flags.get(name) for name in ("class_weight", "sampler")}
        for name, way in WAYS.items():
            if way.loss == choice.loss and asked == {flag: way.flags.get(flag) for flag in asked}:
                return name
        return choice.loss

    def tables(self, found: Sequence[Choice]) -> tuple[Table, ...]:
        note = "Many: classes of more than 100 training images; medium: 20 to 100; few: fewer than 20."
        return (
            list_table("Accuracy on a long tail", found, self.METRICS, self.REFERENCE, name=self.name, note=note),
            differences_table(found, self.KEY, self.key, self.METRICS, baseline=PLAIN, name=self.name),
            trials_table(found, self.KEY, self.key, self.METRIC, name=self.name),
        )

    def claims(self, found: Sequence[Choice]) -> list[Claim]:
        return [
            claim
            for better, worse in COMPARED
            for metric, words in (("macro_top5", "macro top-5"), ("macro_top1", "macro top-1"))
            for claim in self.pair(f"On a long tail {better} beats {worse} in {words}.", found, better, worse, metric)
        ]


STUDY = RareClasses()
