"""The noise of the noised top-k loss: Garcin et al. 2022, Tables 2 and 3, Figure 2."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from topk_studies.baselines.paper import DRAWS as DRAWS_PAPER
from topk_studies.engine.experiment import VariantStudy
from topk_studies.engine.statistics import Claim
from topk_studies.engine.study import Figure, Note, Options, Table
from topk_studies.engine.tuning import Choice
from topk_studies.engine.variants import option_of
from topk_studies.report.display import TRAINING_PANELS, curves_figure, first_runs, grid_table, lines_figure

EPSILONS = (0.0, 0.1, 1.0, 10.0, 100.0)
DRAWS = (1, 5, 50)
EPSILON, DRAW = 1.0, 5


class NoiseParameter(VariantStudy):
    NAME = "noise-parameter"
    TITLE = "Noise parameter"
    QUESTION = "How do the noise's deviation epsilon and the number of draws B change the noised loss and its gradient?"
    REFERENCE = "Garcin et al. 2022, Tables 2 and 3, Figure 2"
    LOSSES = ("noised_topk",)
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "epsilon"
    PROTOCOL = "epsilon = 0 is the calibrated hinge."

    def key(self, choice: Choice) -> float:
        return epsilon_of(choice)

    def name(self, choice: Choice) -> str:
        return f"B = {draws_of(choice)}"

    def points(self, options: Options) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        values = [(epsilon, DRAW) for epsilon in EPSILONS] + [(EPSILON, draws) for draws in DRAWS]
        return [
            (loss, {"epsilon": epsilon, "num_samples": draws}, {})
            for loss in options.losses or self.LOSSES
            for epsilon, draws in values
        ]

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        return tuple(
            grid_table(title, name, key, some, metric, self.REFERENCE)
            for title, name, key, some in (
                (f"Accuracy by epsilon, B = {DRAW}", "epsilon", epsilon_of, _by_epsilon(all_choices)),
                (f"Accuracy by draws, epsilon = {EPSILON:g}", "B", draws_of, _by_draws(all_choices)),
            )
            for metric in self.METRICS
        )

    def figures(self, all_choices: Sequence[Choice]) -> tuple[Figure, ...]:
        some = _by_epsilon(all_choices)
        noisy = [choice for choice in some if epsilon_of(choice)]
        return (
            lines_figure("Top-5 accuracy against epsilon", "epsilon", epsilon_of, noisy, "top5", log=True),
            curves_figure(
                "Gradient sparsity",
                "Share of the scores whose gradient is not zero, and accuracy, at several epsilon; "
                f"B = {DRAW}, first seed. Samples beyond the hinge have no gradient, whatever epsilon.",
                first_runs(some, lambda choice: f"epsilon={epsilon_of(choice):g}"),
                (TRAINING_PANELS[-1], *TRAINING_PANELS[:-1]),
                log=("nonzero",),
            ),
        )

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim | Note]:
        some = _by_epsilon(all_choices)
        mine = {epsilon_of(choice): choice for choice in some if choice.loss == self.LOSSES[0]}
        texts = {
            EPSILONS[0]: "Too little noise does not learn well: the gradient is too sparse (Garcin, Table 2).",
            EPSILONS[-1]: "Too much noise does not learn well either (Garcin, Table 2).",
        }
        claims = [
            self.versus(text, mine[EPSILON], mine[other], f"epsilon = {EPSILON:g}", f"epsilon = {other:g}")
            for other, text in texts.items()
            if EPSILON in mine and other in mine
        ]
        return [*claims, *_sparsity(some), *self._flat(_by_draws(all_choices))]

    def _flat(self, by_draws: Sequence[Choice]) -> list[Claim]:
        """Whether ten times as many draws as the paper's choice change anything."""
        mine = {draws_of(choice): choice for choice in by_draws if choice.loss == self.LOSSES[0]}
        if not {DRAW, DRAWS[-1]} <= mine.keys():
            return []
        text = "The number of draws matters little: B = 5 is enough (Garcin, Table 3)."
        names = (f"B = {DRAWS[-1]}", f"B = {DRAW}")
        claim = self.versus(text, mine[DRAWS[-1]], mine[DRAW], *names, paper=DRAWS_PAPER[DRAWS[-1]] - DRAWS_PAPER[DRAW])
        return [replace(claim, none=True)]


def epsilon_of(choice: Choice) -> float:
    return option_of(choice, "epsilon", EPSILON)


def draws_of(choice: Choice) -> int:
    return option_of(choice, "num_samples", DRAW)


def _by_epsilon(choices: Sequence[Choice]) -> list[Choice]:
    return sorted((choice for choice in choices if draws_of(choice) == DRAW), key=epsilon_of)


def _by_draws(choices: Sequence[Choice]) -> list[Choice]:
    return sorted((choice for choice in choices if epsilon_of(choice) == EPSILON), key=draws_of)


def _sparsity(by_epsilon: Sequence[Choice]) -> list[Note]:
    """Whether the first epoch's gradient gets denser with each larger epsilon."""
    shares = [
        (epsilon_of(choice), [record.result["history"][0]["nonzero"] for record in choice.runs.values()])
        for choice in by_epsilon
    ]
    if len(shares) < 2:
        return []
    means = [sum(values) / len(values) for _, values in shares]
    # from there on B draws touch B + 1 scores at most, and the shares differ by how many samples are beyond the hinge
    rising = means[0] < means[-1] and all(b > 0.95 * a for a, b in pairwise(means))
    told = ", ".join(f"{mean:.3g} at {epsilon:g}" for (epsilon, _), mean in zip(shares, means, strict=True))
    text = "The gradient gets denser as epsilon grows (Garcin, Figure 2)."
    limit = f"B = {DRAW} draws and the label touch {DRAW + 1} scores of a sample at most"
    return [Note(text, "agrees" if rising else "differs", f"share not zero in the first epoch: {told}; {limit}")]


STUDY = NoiseParameter()
