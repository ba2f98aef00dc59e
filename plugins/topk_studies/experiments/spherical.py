"""Spherical losses with few and with many classes: de Brebisson, Vincent 2016, section 5."""

from collections.abc import Sequence
from typing import Any

from topk_studies.baselines.paper import SPHERICAL, gap
from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.settings import BUILT_IN, POSTERIOR, base_flags
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Figure, Options, Table
from topk_studies.engine.tuning import Choice

# the built-in sets with 10 classes, in 2 families of 5; the default, 20 families, is what other studies train on
TEN: dict[str, dict[str, Any]] = {BUILT_IN: {"superclasses": 2, "fine": 5}, POSTERIOR: {"families": 2, "fine": 5}}
MANY = "With many classes softmax beats them."
SOURCE = (
    "The paper's columns are its accuracies on CIFAR-10 and CIFAR-100, with its own networks, as quoted in "
    "F. Sobolevsky's summary of it."
)


class Spherical(TunedStudy):
    NAME = "spherical"
    TITLE = "Spherical losses"
    QUESTION = "Do the spherical alternatives to softmax win with few classes, and lose with many?"
    REFERENCE = "de Brebisson, Vincent 2016, section 5 (MNIST, CIFAR-10, CIFAR-100, Penn Treebank)"
    LOSSES = ("ce", "log_taylor_softmax", "log_spherical_softmax")
    METRIC = "top1"
    METRICS = ("top1", "top5")
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "classes"

    def settings(self, options: Options) -> list[dict[str, Any]]:
        """Data sets of several numbers of classes: of the built-in set, CIFAR's two, or the one that is named."""
        base = base_flags(options)
        ten = TEN.get({**base, **options.flags}.get("dataset", ""))
        if ten:
            return [{"dataset_opt": {**base.get("dataset_opt", {}), **ten}}, {}]
        if base.get("dataset") == "torch/cifar100" and not options.flags.get("dataset"):
            return [{"dataset": "torch/cifar10", "num_classes": 10}, {}]
        return [{}]

    def key(self, choice: Choice) -> int:
        named = choice.flags.get("dataset_opt", {})
        if "fine" in named:
            return named["fine"] * named.get("superclasses", named.get("families"))
        return choice.flags.get("num_classes", 100)

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        main = self.grid_table("Accuracy by classes", all_choices, self.METRIC, paper=SPHERICAL, note=SOURCE)
        return (main, *self.tuning_tables(all_choices))

    def figures(self, all_choices: Sequence[Choice]) -> tuple[Figure, ...]:
        return (self.lines("Top-1 against classes", all_choices, log=True),)

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        claims: list[Claim] = []
        for loss in dict.fromkeys(choice.loss for choice in all_choices if choice.loss != "ce"):
            for size, here in sorted(self.by_key(all_choices)):
                few = size <= 10
                text = "With few classes the spherical losses beat softmax." if few else MANY
                pair = (loss, "ce") if few else ("ce", loss)
                paper = gap(SPHERICAL, size, *pair)
                claims += self.pair(text, here, *pair, where=f"{size} classes", paper=paper)
        return claims


STUDY = Spherical()
