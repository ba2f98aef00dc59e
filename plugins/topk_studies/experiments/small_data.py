"""Accuracy on subsets of the training data: Berrada et al. 2018, Table 2."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from topk_studies.baselines.paper import SUBSETS, gap
from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.settings import base_flags
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Figure, Options
from topk_studies.engine.tuning import Choice

SHARES = {"small": (0.25, 1.0), "standard": (0.1, 0.25, 0.5, 1.0), "paper": (0.05, 0.1, 0.25, 0.5, 1.0)}


class LittleData(TunedStudy):
    NAME = "small-data"
    TITLE = "Little data"
    QUESTION = "Does a top-k loss gain on cross-entropy where there are fewer training images?"
    REFERENCE = "Berrada et al. 2018, Table 2 (ImageNet subsets)"
    LOSSES = ("ce", "smooth_topk_svm")
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "share"
    PROTOCOL = "A subset is trained on for as many updates as the whole."

    def settings(self, options: Options) -> list[dict[str, float]]:
        return [{"subset": share} for share in SHARES[options.budget]]

    def options_of(self, options: Options, flags: Mapping[str, Any]) -> Options:
        """Train longer on a subset, so that updates and evaluations are as many as on the whole."""
        longer = round(1 / flags["subset"])
        if longer == 1:
            return options
        whole = {**base_flags(options), **options.flags}
        often = longer * whole.get("val_interval", 1)
        return replace(options, flags={**options.flags, "epochs": longer * whole["epochs"], "val_interval": often})

    def key(self, choice: Choice) -> float:
        return choice.flags.get("subset", 1.0)

    def figures(self, all_choices: Sequence[Choice]) -> tuple[Figure, ...]:
        return (self.lines("Top-5 accuracy against the share of the training images", all_choices, log=True),)

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        text = "With little data the smooth top-5 SVM beats cross-entropy in top-5 (Berrada, Table 2)."
        return [
            claim
            for share, here in self.by_key(all_choices)
            if share < 1
            for claim in self.pair(
                text,
                here,
                "smooth_topk_svm",
                "ce",
                where=f"{share:g} of the data",
                paper=gap(SUBSETS, share, "smooth_topk_svm", "ce"),
            )
        ]


STUDY = LittleData()
