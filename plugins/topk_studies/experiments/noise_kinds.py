"""Robust losses under wrong labels of several kinds: what people get wrong is neither uniform nor within families."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.settings import MIDDLE, K, Trial, grid, trials
from topk_studies.engine.statistics import Claim, paired
from topk_studies.engine.study import Options, Record
from topk_studies.engine.tuning import Choice, choices

BASELINE, SMOOTH, EPSILON = "ce", "smooth_topk_svm", "epsilon_softmax"
GENERALISED, ALDR, EPSILON_K = "generalised_cross_entropy", "aldr_kl", f"{EPSILON} k={K}"
SHARE = 0.4  # of the labels that are wrong, whatever the kind
FINE = 5  # classes in a family of the built-in data: of so many redrawn labels one stays as it was
GENTLE = 0.1  # beta of epsilon-softmax of the five best: the absolute error pulls labels on to the top
PEOPLE = ("confusions", "annotators")
KINDS = (*PEOPLE, "uniform", "family")
GRIDS: dict[str, tuple[Trial, ...]] = {  # as many trials as the other losses have
    GENERALISED: grid("q", 0.3, 0.7, rates=MIDDLE),
    ALDR: grid("temperature", 0.3, 1.0, rates=MIDDLE),
    EPSILON: grid("alpha", 0.03, 0.3, rates=MIDDLE),
}
TOP1 = {
    GENERALISED: "Generalised cross-entropy beats cross-entropy in top-1 under label noise (Zhang, Sabuncu).",
    ALDR: "ALDR-KL beats cross-entropy in top-1 under label noise (Zhu et al.).",
    EPSILON: "Epsilon-softmax with the absolute error beats cross-entropy in top-1 under label noise (Wang et al.).",
}
TOP5 = {
    SMOOTH: "The smooth top-5 SVM beats cross-entropy in top-5, whatever the kind of noise.",
    EPSILON_K: "Epsilon-softmax of the five best beats cross-entropy in top-5, whatever the kind of noise.",
}


class KindsOfNoise(TunedStudy):
    NAME = "noise-kinds"
    TITLE = "Kinds of label noise"
    QUESTION = "Which loss keeps its accuracy where labels are wrong as people make them wrong?"
    REFERENCE = "Zhang, Sabuncu 2018; Zhu et al. 2023; Wang et al. 2024"
    LOSSES = (BASELINE, GENERALISED, ALDR, SMOOTH, EPSILON)
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "kind"
    PROTOCOL = (
        f"Of the training labels {SHARE:.0%} are wrong, in expectation where they are redrawn within families; trials "
        "are judged by top-5, and top-1 is of the same trial."
    )

    def settings(self, options: Options) -> list[dict[str, Any]]:
        redrawn = {"label_noise": SHARE * FINE / (FINE - 1)}
        return [redrawn if kind == "family" else {"label_noise": SHARE, "label_noise_kind": kind} for kind in KINDS]

    def contestants(self, options: Options) -> list[tuple[str, Mapping[str, Any]]]:
        contestants = super().contestants(options)
        return [*contestants, *((loss, {"k": K, "beta": GENTLE}) for loss, _ in contestants if loss == EPSILON)]

    def trials(self, options: Options, loss: str) -> Sequence[Trial] | None:
        return trials(options, loss) if options.budget == "paper" else GRIDS.get(loss)

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        """The best trial of each loss; one with another k is another loss."""
        by_k: dict[int | None, list[Record]] = {}
        for record in records:
            by_k.setdefault(record.configuration["flags"].get("loss_opt", {}).get("k"), []).append(record)
        return [choice for group in by_k.values() for choice in choices(group, metric=self.METRIC, tuned=self.TUNED)]

    def key(self, choice: Choice) -> str:
        return choice.flags.get("label_noise_kind", "family")

    def name(self, choice: Choice) -> str:
        k = choice.trial.get("loss_opt", {}).get("k")
        return choice.loss if k is None else f"{choice.loss} k={k}"

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        claims = [claim for loss, text in TOP1.items() for claim in self._on_average(text, all_choices, loss, "top1")]
        for loss, text in TOP5.items():
            claims += self._on_average(text, all_choices, loss, "top5")
        for kind, here in self.by_key(all_choices):
            if kind in PEOPLE:
                claims += self.pair(TOP5[SMOOTH], here, SMOOTH, BASELINE, where=kind)
        return claims

    def _on_average(self, text: str, all_choices: Sequence[Choice], loss: str, metric: str) -> list[Claim]:
        """The claim on the mean over the kinds, averaged before seeds are compared."""
        scores = [self._mean(all_choices, name, metric) for name in (loss, BASELINE)]
        if not all(scores):
            return []
        kinds = [kind for kind, _ in self.by_key(all_choices)]
        compared = tuple(choice for choice in all_choices if self.name(choice) in (loss, BASELINE))
        words = f"mean over {', '.join(kinds)}, {metric.replace('top', 'top-')} of {loss} less {BASELINE}"
        return [Claim(text, paired(*scores), words, compared)]

    def _mean(self, all_choices: Sequence[Choice], loss: str, metric: str) -> dict[int, float]:
        each = [choice.scores(metric) for choice in all_choices if self.name(choice) == loss]
        seeds = set.intersection(*map(set, each)) if each else set()
        return {seed: sum(scores[seed] for scores in each) / len(each) for seed in sorted(seeds)}


STUDY = KindsOfNoise()
