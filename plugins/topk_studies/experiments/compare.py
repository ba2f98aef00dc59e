"""Which loss to take on one's own data: every registered loss, tuned alike, ranked with what the ranking is worth.

Tuning is successive halving on a seed of its own. Each loss has ``TRIALS`` points of its own grid and of the learning
rate; they train for an eighth of the epochs, the better half for a quarter, the better half of those for a half. The
best one trains in full on other seeds. Every loss gets the same number of epochs. With folds, a trial is the mean of as
many runs, each judged on another part of the training data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import comb
from statistics import fmean
from typing import Any

from topk_registry import registry
from topk_registry.registry.errors import PluginError
from topk_registry.registry.options import accepts
from topk_registry.train.errors import TrainError
from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.registered import grid_of
from topk_studies.engine.settings import K, Trial, base_flags, rates
from topk_studies.engine.statistics import Claim, settle
from topk_studies.engine.store import canonical
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record
from topk_studies.engine.training import command
from topk_studies.engine.tuning import TUNING_SEED, Choice, merge, metric_of, run_of, score, seed_of
from topk_studies.experiments import compare_doubts as doubts
from topk_studies.experiments import compare_findings as findings
from topk_studies.experiments.compare_findings import BASELINE
from topk_studies.old_trainer import TrainConfig
from topk_studies.old_trainer.config.metric_names import METRIC
from topk_studies.old_trainer.setup.datasets import open_data

TRIALS = 8
RUNGS = ((8, 8), (4, 4), (2, 2))  # (trials, part of the epochs that each trains for)


class Compare(TrainingStudy):
    NAME = "compare"
    TITLE = "Comparison"
    QUESTION = "Which loss is best on this data, and how sure is that?"
    REFERENCE = "successive halving: Jamieson, Talwalkar 2016"
    SEEDS = (0, 1, 2, 3, 4)

    def wanted(self, options: Options, known: Sequence[Record], seeds: Sequence[int]) -> list[Configuration]:
        finished = {canonical(record.configuration): record for record in known}
        tuned, winners = [], []
        for loss in options.losses or registry.list_losses():
            runs, winner = _halving(options, loss, finished)
            tuned += runs
            winners += [winner] if winner else []
        # all losses with one seed, then all with the next: a budget that ends early ends alike for all
        return tuned + [run_of(judged(options), seed=seed, **winner) for seed in seeds for winner in winners]

    def foreseen(self, options: Options) -> Sequence[str]:
        try:
            config = TrainConfig.from_dict(run_of(judged(options), loss=BASELINE, seed=TUNING_SEED)["flags"])
            data = open_data(config)
        except (TrainError, PluginError):
            return ()  # the first run says so
        classes = data.num_classes or config.num_classes or 0
        match = METRIC.fullmatch(config.eval_metric)
        sized = doubts.of_k(int(match[2]), classes) if match and match[2] and classes else []
        few = doubts.of_few_images(len(data.validation) if hasattr(data.validation, "__len__") else 0, options.folds)
        return [f"note: {doubt}" for doubt in (*sized, *few)]

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        """The losses with results, the best first."""
        by_loss: dict[str, list[Record]] = {}
        for record in records:
            by_loss.setdefault(record.configuration["flags"]["loss"], []).append(record)
        chosen = [choice for loss, runs in by_loss.items() if (choice := _choice(loss, runs)).runs]
        metric = metric_of(records)
        return sorted(chosen, key=lambda choice: -findings.mean_of(choice, metric))

    def claims(self, all_choices: Sequence[Choice]) -> list[Claim]:
        if not all_choices:
            return []
        metric = metric_of(list(all_choices[0].runs.values()))
        best, *others = all_choices
        return [
            self.versus(f"{best.loss} is better than {other.loss}.", best, other, best.loss, other.loss, metric)
            for other in others
        ]

    def settle(self, claims: Sequence[Claim | Note]) -> tuple[Note, ...]:
        """Any two losses might have been compared, as the best is found by looking: all pairs share the error."""
        notes = settle(claims, count=comb(len(claims) + 1, 2))
        return tuple(
            replace(doubts.doubted(claim, note) if isinstance(claim, Claim) else note, beyond=True)
            for claim, note in zip(claims, notes, strict=True)
        )

    def report(self, records: Sequence[Record]) -> Findings:
        choices, metric = self.choices(records), metric_of(records)
        notes = self.settle(self.claims(choices))
        return Findings(
            tables=(findings.ranking(choices, notes, metric), findings.tuning(choices, metric)),
            notes=(*findings.advice(choices, notes, metric), *notes),
            protocol=findings.protocol(choices, metric, RUNGS),
            commands=tuple((findings.RECOMMENDED, command(_first(choice).configuration)) for choice in choices[:1]),
        )


def k_of(options: Options) -> int:
    """The k that the losses have: the command line's, or the usual one; of several the largest."""
    given = options.flags.get("loss_opt", {}).get("k", K)
    return max(given) if isinstance(given, (list, tuple)) else given


def judged(options: Options) -> Options:
    """The options with the metric that belongs to k, and with the part of the data that folds hold out."""
    flags = dict(options.flags)
    flags.setdefault("eval_metric", f"top{k_of(options)}")
    if options.folds > 1:
        flags.setdefault("val_split", f"{1 / options.folds:.6g}")
    return replace(options, flags=flags)


def _halving(
    options: Options, loss: str, finished: Mapping[str, Record]
) -> tuple[list[Configuration], dict[str, Any] | None]:
    """The runs of tuning until now, and the flags that it ends with once all of them are known."""
    left = list(trials(options, loss))
    wanted: list[Configuration] = []
    for count, part in RUNGS:
        runs = [_short(options, part, loss=loss, **trial) for trial in left[:count]]  # of each trial, a run a fold
        first = finished.get(canonical(runs[0][0]))
        if not wanted and (first is None or first.error):
            return runs[0][:1], None  # a loss that does not take this data says so once; the page tells why
        wanted += chain.from_iterable(runs)
        records = [[finished.get(canonical(run)) for run in folds] for folds in runs]
        if any(record is None for record in chain.from_iterable(records)):
            return wanted, None
        scored = []
        for folds, trial in zip(records, left, strict=False):
            done = [record for record in folds if record is not None and not record.error]
            if len(done) == len(folds):
                metric = metric_of(done)
                scored.append((fmean(score(record, metric, "validation") for record in done), trial))
        scored.sort(key=lambda one: -one[0])
        left = [trial for _, trial in scored]
    return wanted, {"loss": loss, **left[0]} if left else None


def _short(options: Options, part: int, **flags: Any) -> list[Configuration]:
    """Runs of a part of the epochs, one a fold; without warm-up where that would be most of it."""
    base = {**base_flags(options), **options.flags}
    epochs = max(1, base.get("epochs", 300) // part)
    warmup = base.get("warmup_epochs", 5)
    changes = {"epochs": epochs, "warmup_epochs": warmup if 2 * warmup < epochs else 0}
    asked = judged(replace(options, flags={**options.flags, **changes}))
    folds = range(options.folds)
    return [run_of(asked, seed=TUNING_SEED, **flags, **({"val_fold": fold} if fold else {})) for fold in folds]


def trials(options: Options, loss: str) -> list[Trial]:
    """Return the trials of a loss, the same number for every loss, spread over its grid and the learning rates."""
    grid = grid_of(loss)
    if len(grid) > TRIALS:
        grid = [grid[i * len(grid) // TRIALS] for i in range(TRIALS)]
    each = -(-TRIALS // len(grid))
    base = {**base_flags(options), **options.flags}
    k = {"loss_opt": {"k": k_of(options)}} if accepts(registry.get_loss_builder(loss), "k") else {}
    spread = rates(str(base.get("opt", "sgd")), each, options.rates)
    pairs: list[Trial] = [merge(merge(k, point), {"lr": lr}) for lr in spread for point in grid]
    # the middle rates first: of a number that the grid does not divide, the outermost are left out
    order = sorted(range(len(pairs)), key=lambda i: abs(i - (len(pairs) - 1) / 2))
    return [pairs[i] for i in order[:TRIALS]]


def _choice(loss: str, records: Sequence[Record]) -> Choice:
    tried = tuple(record for record in records if seed_of(record) == TUNING_SEED)
    runs = {seed_of(record): record for record in records if seed_of(record) != TUNING_SEED}
    flags = next(iter(runs.values()), records[0]).configuration["flags"]
    trial = {name: flags[name] for name in ("lr", "loss_opt", "normalize_classifier") if name in flags}
    rest = {name: value for name, value in flags.items() if name not in (*trial, "seed", "loss")}
    return Choice(loss, rest, trial, runs, tried)


def _first(choice: Choice) -> Record:
    return choice.runs[min(choice.runs)]


STUDY = Compare()
