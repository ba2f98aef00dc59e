"""The required gap alpha of the smooth top-k SVM: Berrada et al. 2018, Tables 7 and 8, where it is called margin."""

from collections.abc import Sequence
from typing import Any

from topk_studies.baselines.paper import MARGIN
from topk_studies.engine.experiment import VariantStudy
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Figure, Options
from topk_studies.engine.tuning import Choice, label_noise_of
from topk_studies.engine.variants import option_of
from topk_studies.report.display import lines_figure

WITHOUT = "topk_nll"  # the same loss at alpha = 0
VALUES = {"small": (1.0, 10.0), "standard": (0.1, 1.0, 10.0, 100.0), "paper": (0.1, 1.0, 10.0, 100.0)}
TAU = {"small": 0.1, "standard": 0.1, "paper": 1.0}
LEVELS = {"small": (0.0, 0.8), "standard": (0.0, 0.4, 0.8), "paper": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}


class Margin(VariantStudy):
    NAME = "margin"
    TITLE = "Margin"
    QUESTION = "Does the smooth top-5 SVM need its required gap alpha, and how large a one?"
    REFERENCE = "Berrada et al. 2018, Tables 7 and 8"
    LOSSES = ("smooth_topk_svm",)
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "noise"
    PROTOCOL = "alpha = 0 is topk_nll."

    def points(self, options: Options) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        tau = {"tau": TAU[options.budget]}
        # the default left out is a run that other studies share
        values = [{} if alpha == 1.0 else {"alpha": alpha} for alpha in VALUES[options.budget]]
        losses = options.losses or self.LOSSES
        each = [(WITHOUT, tau), *((loss, {**tau, **alpha}) for loss in losses for alpha in values)]
        return [(*point, {"label_noise": level}) for level in LEVELS[options.budget] for point in each]

    def name(self, choice: Choice) -> str:
        ours = choice.loss in (*self.LOSSES, WITHOUT)
        return f"alpha = {alpha_of(choice):g}" if ours else f"{choice.loss} {alpha_of(choice):g}"

    def figures(self, all_choices: Sequence[Choice]) -> tuple[Figure, ...]:
        def noise(choice: Choice) -> str:
            return f"noise {label_noise_of(choice):g}"

        return (lines_figure("Top-5 accuracy against alpha", "alpha", alpha_of, all_choices, "top5", name=noise),)

    def key(self, choice: Choice) -> float:
        return label_noise_of(choice)

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        text = "The margin helps: alpha = 1 beats alpha = 0 in top-5 (Berrada, Table 8)."
        return [
            claim
            for level, here in self.by_key(all_choices)
            for claim in self.pair(
                text,
                here,
                "alpha = 1",
                "alpha = 0",
                where=f"noise {level:g}",
                paper=None if level else MARGIN[1] - MARGIN[0],
            )
        ]


def alpha_of(choice: Choice) -> float:
    return 0.0 if choice.loss == WITHOUT else option_of(choice, "alpha", 1.0)


STUDY = Margin()
