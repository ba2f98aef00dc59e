"""What helps where an image has several labels: losses for them, the likelihood of a set, weights of positive terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.settings import Trial
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Configuration, Options, Record, Table
from topk_studies.engine.tuning import TUNED, TUNING_SEED, Choice, choices, tuned_runs
from topk_studies.report.display import differences_table, list_table, trials_table

PLAIN = "bce"
# a tail of classes thirty times rarer than the first; few images, so that a run takes seconds
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
DATA: dict[str, Any] = {
    "task": "multilabel",
    "dataset": "topk/several",
    "dataset_opt": {"size": 2000, "eval_size": 1000, "imbalance": 30.0},
    "model_kwargs": {"norm": True, "width": 8},
    "epochs": 10,
    "eval_metric": "map",
}


@dataclass(frozen=True)
class Way:
    """A way to train on several labels.

    Args:
        loss: the loss.
        flags: what is fixed.
        trials: what tuning chooses from.
    """

    loss: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    trials: Sequence[Trial] = tuple({"lr": lr} for lr in RATES)


WAYS = {
    PLAIN: Way(PLAIN),
    "bce, weights neg_pos": Way(
        PLAIN,
        {"loss_pos_weight": "neg_pos"},
        tuple({"lr": lr, "loss_weight_power": power} for power in (0.25, 0.5) for lr in RATES[1:3]),
    ),
    "asl": Way("asl"),
    "twoway": Way("twoway"),
    "zlpr": Way("zlpr"),
    "db": Way("db"),
    "ksubset_nll": Way("ksubset_nll"),
}
CLAIMS = {
    "asl": "The asymmetric loss beats binary cross-entropy (Ridnik et al. 2021).",
    "twoway": "The two-way loss beats binary cross-entropy (Kobayashi 2023).",
    "zlpr": "The loss of pairwise ranking and a threshold beats binary cross-entropy (Su et al. 2022).",
    "db": "The distribution-balanced loss beats binary cross-entropy on a long tail (Wu et al. 2020).",
    "bce, weights neg_pos": "Weights of the positive term raise what is found of rare classes.",
    "ksubset_nll": "The likelihood of the set of labels beats binary cross-entropy.",
}


class SeveralLabels(TrainingStudy):
    NAME = "several-labels"
    TITLE = "Several labels"
    QUESTION = "Which loss finds most of an image's labels, common ones and rare ones?"
    REFERENCE = (
        "no paper's table: Ridnik et al. 2021, Kobayashi 2023, Su et al. 2022, Wu et al. 2020 propose the losses"
    )
    METRIC = "map"
    METRICS = ("map", "macro_f1", "micro_f1", "top5_recall")
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "data"
    TUNED = (*TUNED, "loss_weight_power")
    PROTOCOL = "F1 counts a class as predicted from a probability of one half."

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        tuning = None if options.max_seeds is None else TUNING_SEED
        return [
            configuration
            for way in WAYS.values()
            if options.losses is None or way.loss in options.losses
            for configuration in tuned_runs(
                options,
                known,
                way.loss,
                seeds,
                {**DATA, **way.flags},
                metric=self.METRIC,
                grid=way.trials,
                tuning_seed=tuning,
            )
        ]

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        return choices(records, metric=self.METRIC, tuned=self.TUNED)

    def key(self, choice: Choice) -> str:
        return choice.flags.get("dataset", "")

    def name(self, choice: Choice) -> str:
        """The way that a setting is."""
        weighted = choice.flags.get("loss_pos_weight")
        return f"{choice.loss}, weights {weighted}" if weighted else choice.loss

    def tables(self, found: Sequence[Choice]) -> tuple[Table, ...]:
        return (
            list_table("Several labels an image", found, self.METRICS, self.REFERENCE, name=self.name),
            differences_table(found, self.KEY, self.key, self.METRICS, baseline=PLAIN, name=self.name),
            trials_table(found, self.KEY, self.key, self.METRIC, name=self.name),
        )

    def claims(self, found: Sequence[Choice]) -> list[Claim]:
        return [
            claim
            for better, text in CLAIMS.items()
            for metric in ("map", "macro_f1")
            for claim in self.pair(text, found, better, PLAIN, metric)
        ]


STUDY = SeveralLabels()
