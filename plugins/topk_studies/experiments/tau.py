"""The default of tau: the smooth top-k SVM at several temperatures, by label noise and by depth of the network."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.baselines.paper import TEMPERATURE, less
from topk_studies.engine.experiment import TunedStudy
from topk_studies.engine.settings import Trial, base_flags, trials
from topk_studies.engine.statistics import Claim, paired
from topk_studies.engine.study import Options, Table
from topk_studies.engine.tuning import Choice, groups, label_noise_of
from topk_studies.engine.variants import option_of
from topk_studies.report import display

BASELINE, SMOOTH = "ce", "smooth_topk_svm"
VALUES = (0.1, 0.3, 1.0)
LEVELS = (0.0, 0.4, 0.8)
RATES = {"topk_mlp": (5e-4, 1e-3, 2e-3)}
FEW = (1e-3, 2e-3)  # of networks whose runs take longer
DEEP = {"topk_convnet": 2, "topk_mlp": 4}  # twice the convolutions, and twice the hidden layers
ON_CIFAR = VALUES[-1]  # the paper's on CIFAR-100, which the others are compared with


class Tau(TunedStudy):
    NAME = "tau"
    TITLE = "Default of tau"
    QUESTION = "Which tau should the smooth top-5 SVM have where nothing is known of the data?"
    REFERENCE = "Berrada et al. 2018, Table 6"
    LOSSES = (SMOOTH,)
    SEEDS = (0, 1, 2, 3, 4)
    KEY = "network, noise"
    TUNED = ("lr",)
    PROTOCOL = "Deep is twice the convolutions of each resolution, or twice the hidden layers."

    def settings(self, options: Options) -> list[dict[str, Any]]:
        base = base_flags(options)
        kinds: list[dict[str, Any]] = [{}]
        if options.budget != "paper" and "model" not in options.flags:
            kinds.append({"model_kwargs": {**base["model_kwargs"], "depth": DEEP[base["model"]]}})
        return [{"label_noise": level, **kind} for level in LEVELS for kind in kinds]

    def contestants(self, options: Options) -> list[tuple[str, Mapping[str, Any]]]:
        """Cross-entropy and every value of tau; of losses that the command line names, these alone."""
        losses = options.losses or (BASELINE, *self.LOSSES)
        return [each for loss in losses for each in _contestants(loss)]

    def trials(self, options: Options, loss: str) -> Sequence[Trial] | None:
        if options.budget == "paper":  # the published settings but for tau, which is what is compared
            return [
                {flag: value for flag, value in each.items() if flag != "loss_opt"} for each in trials(options, loss)
            ]
        return [{"lr": rate} for rate in RATES.get(base_flags(options)["model"], FEW)]

    def key(self, choice: Choice) -> str:
        return f"{network_of(choice)}, {label_noise_of(choice):g}"

    def name(self, choice: Choice) -> str:
        return BASELINE if choice.loss == BASELINE else f"{_prefix(choice)}tau = {_tau(choice):g}"

    def tables(self, all_choices: Sequence[Choice]) -> tuple[Table, ...]:
        grids = [self.grid_table("Accuracy by tau", all_choices, metric) for metric in self.METRICS]
        papers = f"tau = {ON_CIFAR:g}"
        against = display.differences_table(
            all_choices, self.KEY, self.key, self.METRICS, baseline=papers, name=self.name
        )
        return (*grids, against, *self.tuning_tables(all_choices))

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        claims = []
        for network, here in groups(all_choices, network_of).items():
            for low, high in ((0.1, 1.0), (0.3, 1.0), (0.1, 0.3)):
                first, second = _mean_over_noise(here, low), _mean_over_noise(here, high)
                if not first or not second:
                    continue
                paper = less(TEMPERATURE.get((low, SMOOTH)), TEMPERATURE.get((high, SMOOTH)))
                source = "" if paper is None else " (Berrada, Table 6)"
                text = f"A smaller tau is better: {low:g} beats {high:g} in top-5{source}."
                of = f"{network} network, mean over noise, top-5 of tau = {low:g} less tau = {high:g}"
                compared = tuple(choice for choice in here if choice.loss == SMOOTH and _tau(choice) in (low, high))
                claims.append(Claim(text, paired(first, second), of, compared, paper=paper))
        return claims


def network_of(choice: Choice) -> str:
    """``deep`` or ``usual``, the network of the other studies."""
    return "deep" if "depth" in choice.flags.get("model_kwargs", {}) else "usual"


def _tau(choice: Choice) -> float:
    return option_of(choice, "tau", 1.0)


def _contestants(loss: str) -> list[tuple[str, dict[str, Any]]]:
    return [(loss, {})] if loss == BASELINE else [(loss, {"tau": tau}) for tau in VALUES]


def _prefix(choice: Choice) -> str:
    return "" if choice.loss == SMOOTH else f"{choice.loss} "


def _mean_over_noise(choices: Sequence[Choice], tau: float) -> dict[int, float]:
    """Top-5 accuracy at a tau, averaged over the levels of noise before seeds are compared."""
    levels = [choice.scores("top5") for choice in choices if choice.loss == SMOOTH and _tau(choice) == tau]
    seeds = set.intersection(*map(set, levels)) if levels else set()
    return {seed: sum(level[seed] for level in levels) / len(levels) for seed in sorted(seeds)}


STUDY = Tau()
