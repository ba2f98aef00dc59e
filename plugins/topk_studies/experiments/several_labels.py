"""What helps where an image has several labels: losses for them, the likelihood of a set, weights of positive terms."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.engine.experiment import Way, WaysStudy
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import TUNED, Choice

PLAIN = "bce"
# a tail of classes thirty times rarer than the first; few images, so that a run takes seconds
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
EACH = tuple({"lr": lr} for lr in RATES)
DATA: dict[str, Any] = {
    "task": "multilabel",
    "dataset": "topk/several",
    "dataset_opt": {"size": 2000, "eval_size": 1000, "imbalance": 30.0},
    "model_kwargs": {"norm": True, "width": 8},
    "epochs": 10,
    "eval_metric": "map",
}

WAYS = {
    PLAIN: Way(PLAIN, trials=EACH),
    "bce, weights neg_pos": Way(
        PLAIN,
        {"loss_pos_weight": "neg_pos"},
        tuple({"lr": lr, "loss_weight_power": power} for power in (0.25, 0.5) for lr in RATES[1:3]),
    ),
    "asl": Way("asl", trials=EACH),
    "twoway": Way("twoway", trials=EACH),
    "zlpr": Way("zlpr", trials=EACH),
    "db": Way("db", trials=EACH),
    "ksubset_nll": Way("ksubset_nll", trials=EACH),
}
CLAIMS = {
    "asl": "The asymmetric loss beats binary cross-entropy (Ridnik et al. 2021).",
    "twoway": "The two-way loss beats binary cross-entropy (Kobayashi 2023).",
    "zlpr": "The loss of pairwise ranking and a threshold beats binary cross-entropy (Su et al. 2022).",
    "db": "The distribution-balanced loss beats binary cross-entropy on a long tail (Wu et al. 2020).",
    "bce, weights neg_pos": "Weights of the positive term raise what is found of rare classes.",
    "ksubset_nll": "The likelihood of the set of labels beats binary cross-entropy.",
}


class SeveralLabels(WaysStudy):
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
    WAYS, PLAIN = WAYS, PLAIN
    TOLD_BY = ("loss_pos_weight",)
    TABLE = "Several labels an image"
    PROTOCOL = "F1 counts a class as predicted from a probability of one half."

    def settings(self, options: Options) -> Sequence[Mapping[str, Any]]:
        return [DATA]

    def key(self, choice: Choice) -> str:
        return choice.flags.get("dataset", "")

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        return [
            claim
            for better, text in CLAIMS.items()
            for metric in ("map", "macro_f1")
            for claim in self.pair(text, all_choices, better, PLAIN, metric)
        ]


STUDY = SeveralLabels()
