"""What helps rare classes: to weigh them, to draw them more often, or a loss that knows their frequencies."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.engine.experiment import Way, WaysStudy
from topk_studies.engine.settings import MIDDLE, TRIALS, Trial
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import TUNED, Choice
from topk_studies.experiments.imbalance import STUDY as IMBALANCE

PLAIN = "cross-entropy"
WEIGHTED = "topk_nll"  # at k = 1 it is cross-entropy that takes weights
ONE: Trial = {"loss_opt": {"k": 1}}


def _tried(flag: str, *values: float) -> tuple[Trial, ...]:
    """Two rates for each value of a flag: as many trials as those of a way without one."""
    return tuple({"lr": lr, flag: value} for value in values for lr in MIDDLE)


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


class RareClasses(WaysStudy):
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
    WAYS, PLAIN = WAYS, PLAIN
    TOLD_BY = ("class_weight", "sampler")
    TABLE = "Accuracy on a long tail"
    NOTE = "Many: classes of more than 100 training images; medium: 20 to 100; few: fewer than 20."

    def settings(self, options: Options) -> Sequence[Mapping[str, Any]]:
        return IMBALANCE.settings(options)

    def key(self, choice: Choice) -> float:
        return IMBALANCE.key(choice)

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        return [
            claim
            for better, worse in COMPARED
            for metric, words in (("macro_top5", "macro top-5"), ("macro_top1", "macro top-1"))
            for claim in self.pair(
                f"On a long tail {better} beats {worse} in {words}.", all_choices, better, worse, metric
            )
        ]


STUDY = RareClasses()
