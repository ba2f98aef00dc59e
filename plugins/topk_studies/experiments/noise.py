"""Accuracy under label noise: Berrada et al. 2018, Table 1; Garcin et al. 2022, Table 4."""

from collections.abc import Sequence

from topk_studies.baselines.paper import NOISE, gap, less
from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.statistics import Claim, paired
from topk_studies.engine.study import Figure, Options, Table
from topk_studies.engine.tuning import Choice, label_noise_of
from topk_studies.report.display import curves_figure, first_runs

SMOOTH, NOISED, BASELINE = "smooth_topk_svm", "noised_topk", "ce"
BEATS = {
    SMOOTH: "With noisy labels the smooth top-5 SVM beats cross-entropy in top-5 (Berrada, Table 1).",
    NOISED: "The balanced noised loss beats cross-entropy in top-5 under label noise (Garcin, Table 4).",
}
MEMORY_PANELS = (
    ("train_top1", "training top-1, noisy labels (%)"),
    ("top5", "validation top-5 (%)"),
    ("test_top5", "test top-5 (%)"),
)
SOURCE = "The paper's columns are Berrada et al., Table 1: CIFAR-100, a DenseNet, 300 epochs."
PAPERS_LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
LEVELS = {"small": (0.0, 0.4, 0.8, 1.0), "standard": PAPERS_LEVELS, "paper": PAPERS_LEVELS}


class LabelNoise(TunedStudy):
    NAME = "noise"
    TITLE = "Label noise"
    QUESTION = "Does a loss keep its accuracy where a share of the training labels is redrawn within their superclass?"
    REFERENCE = "Berrada et al. 2018, Table 1; Garcin et al. 2022, Table 4"
    LOSSES = (BASELINE, SMOOTH, NOISED)
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "noise"

    def settings(self, options: Options) -> list[dict[str, float]]:
        return [{"label_noise": level} for level in LEVELS[options.budget]]

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        title = f"Accuracy by {self.KEY}"
        grids = [
            self.grid_table(title, all_choices, metric, paper=NOISE[metric], note=SOURCE) for metric in self.METRICS
        ]
        return (*grids, *self.tuning_tables(all_choices))

    def figures(self, all_choices: Sequence[Choice]) -> tuple[Figure, ...]:
        return (
            self.lines("Top-5 accuracy against label noise", all_choices),
            self.lines("Top-1 accuracy against label noise", all_choices, "top1"),
            *(_memory(here, level) for level, here in self.by_key(all_choices) if level > 0),
        )

    def key(self, choice: Choice) -> float:
        return label_noise_of(choice)

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        claims: list[Claim] = []
        for level, here in self.by_key(all_choices):
            where = f"noise {level:g}"
            if level == 0.0:
                text = "On clean labels cross-entropy is no worse than the smooth top-5 SVM (Berrada, Table 1)."
                clean = gap(NOISE[self.METRIC], level, BASELINE, SMOOTH)
                claims += self.pair(text, here, BASELINE, SMOOTH, where=where, paper=clean)
                continue
            text = (
                "With noisy labels the smooth top-5 SVM beats cross-entropy, in top-5 and in top-1 (Berrada, Table 1)."
            )
            for metric in self.METRICS:
                claims += self.pair(
                    text, here, SMOOTH, BASELINE, metric, where, gap(NOISE[metric], level, SMOOTH, BASELINE)
                )
            claims += self.pair(BEATS[NOISED], here, NOISED, BASELINE, where=where)
        gains = {loss: _gains(all_choices, loss) for loss in BEATS}
        return claims + _together(all_choices, gains) + _growth(all_choices, gains[SMOOTH])


def _memory(choices: Sequence[Choice], level: float) -> Figure:
    """Draw the share of noisy labels learned by heart, beside the accuracy on the test split."""
    return curves_figure(
        f"Noisy labels learned by heart, noise {level:g}",
        "Share of the training labels, noisy ones among them, that the network gives back, and its accuracy on clean "
        "labels, by epochs; first seed. Early stopping takes the highest point of the curve in the middle.",
        first_runs(choices, lambda choice: choice.loss),
        MEMORY_PANELS,
    )


Gains = dict[float, dict[int, float]]  # by level, then by seed


def _gains(choices: Sequence[Choice], loss: str) -> Gains:
    """Top-5 gains of a loss over cross-entropy."""
    place = {(choice.loss, label_noise_of(choice)): choice.scores("top5") for choice in choices}
    levels = sorted({level for _, level in place})
    gains = {level: paired(place.get((loss, level), {}), place.get((BASELINE, level), {})) for level in levels}
    return {level: gain for level, gain in gains.items() if gain}


def _together(choices: Sequence[Choice], gains: dict[str, Gains]) -> list[Claim]:
    """The gains, averaged over all noisy levels before seeds are compared."""
    claims = []
    for loss, text in BEATS.items():
        noisy = {level: gain for level, gain in gains[loss].items() if level > 0}
        seeds = set.intersection(*map(set, noisy.values())) if noisy else set()
        if seeds and len(noisy) > 1:
            mean = {seed: sum(gain[seed] for gain in noisy.values()) / len(noisy) for seed in sorted(seeds)}
            words = f"mean over noise {', '.join(f'{level:g}' for level in noisy)}, top-5 of {loss} less ce"
            claims.append(Claim(text, mean, words, _compared(choices, loss, *noisy), paper=_paper(loss, *noisy)))
    return claims


def _growth(choices: Sequence[Choice], gains: Gains) -> list[Claim]:
    """Whether the gain over cross-entropy is larger under the most noise than under none."""
    if len(gains) < 2:
        return []
    least, most = min(gains), max(gains)
    text = "The gain over cross-entropy grows with the noise (Berrada, Table 1)."
    words = f"top-5 gain of {SMOOTH} under noise {most:g} less that under {least:g}"
    paper = less(_paper(SMOOTH, most), _paper(SMOOTH, least))
    return [Claim(text, paired(gains[most], gains[least]), words, _compared(choices, SMOOTH, least, most), paper=paper)]


def _paper(loss: str, *levels: float) -> float | None:
    """The paper's gain in top-5 over cross-entropy, on average over levels of noise."""
    gaps = [gap(NOISE["top5"], level, loss, BASELINE) for level in levels]
    known = [each for each in gaps if each is not None]
    return sum(known) / len(known) if len(known) == len(gaps) else None


def _compared(choices: Sequence[Choice], loss: str, *levels: float) -> tuple[Choice, ...]:
    return tuple(choice for choice in choices if choice.loss in (loss, BASELINE) and label_noise_of(choice) in levels)


STUDY = LabelNoise()
