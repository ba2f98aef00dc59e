"""Macro top-k accuracy on a long tail: Garcin et al. 2022, Tables 5, 6 and 8."""

from collections.abc import Sequence

from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.settings import BUILT_IN, IMAGENET, POSTERIOR, base_flags
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Options, Table
from topk_studies.engine.tuning import Choice
from topk_studies.report.display import list_table

OURS = "noised_topk_imbalanced"
TAIL = {"long_tail": "exp", "imbalance_factor": 100.0}  # as CIFAR-100-LT
WARM = {"warmup_epochs": 3}  # of every loss behind convolutions: cosine scores need a high rate
IMAGENET_TAIL = {"long_tail": "pareto", "imbalance_factor": 256.0}  # as ImageNet-LT


class Imbalance(TunedStudy):
    NAME = "imbalance"
    TITLE = "Imbalance"
    QUESTION = "Which loss finds the rare classes of a long tail among its five guesses?"
    REFERENCE = "Garcin et al. 2022, Tables 5, 6 and 8 (Pl@ntNet-300K, ImageNet-LT)"
    LOSSES = ("ce", "focal", "ldam", "smooth_topk_svm", "noised_topk", OURS)
    METRIC = "macro_top5"
    METRICS = ("macro_top5", "many_top5", "medium_top5", "few_top5", "macro_top1")
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "tail"

    def settings(self, options: Options) -> list[dict[str, object]]:
        """The tail; of a built-in set with enough samples that its frequent classes have more than a hundred."""
        base = base_flags(options)
        dataset = {**base, **options.flags}.get("dataset")
        if dataset in (BUILT_IN, POSTERIOR):
            warm = WARM if dataset == BUILT_IN else {}
            return [{**TAIL, **warm, "dataset_opt": {**base.get("dataset_opt", {}), "size": 20_000, "eval_size": 2000}}]
        return [IMAGENET_TAIL if base is IMAGENET else TAIL]

    def key(self, choice: Choice) -> float:
        return choice.flags["imbalance_factor"]

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        note = "Many: classes of more than 100 training images; medium: 20 to 100; few: fewer than 20."
        main = list_table("Accuracy on a long tail", all_choices, self.METRICS, self.REFERENCE, note=note)
        return (main, *self.tuning_tables(all_choices))

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        texts = (
            ("The imbalanced noised loss beats all others in macro top-5 (Garcin, Table 5).", "macro_top5"),
            ("The imbalanced noised loss gains on the classes with few images (Garcin, Table 8).", "few_top5"),
        )
        return [
            claim
            for text, metric in texts
            for other in self.LOSSES
            if other != OURS and (metric == "macro_top5" or other == "ce")
            for claim in self.pair(text, all_choices, OURS, other, metric)
        ]


STUDY = Imbalance()
