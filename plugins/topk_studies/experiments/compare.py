"""Which loss to take on one's own data: every registered loss, tuned alike, ranked with what the ranking is worth.

Tuning is successive halving on a seed of its own. Each loss has ``TRIALS`` points of its own grid and of the learning
rate; they train for an eighth of the epochs, the better half for a quarter, the better half of those for a half. The
best one trains in full on other seeds. Every loss gets the same number of epochs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import comb
from typing import Any

from topk_registry import registry
from topk_studies.engine.experiment import TrainingStudy
from topk_studies.engine.registered import grid_of
from topk_studies.engine.settings import Trial, base_flags, rates
from topk_studies.engine.statistics import Claim, estimate, paired, settle
from topk_studies.engine.store import canonical
from topk_studies.engine.study import Configuration, Findings, Note, Options, Record, Table
from topk_studies.engine.tuning import TUNING_SEED, Choice, best_of, merge, run_of, score, seed_of
from topk_studies.report import display

TRIALS = 8
RUNGS = ((8, 8), (4, 4), (2, 2))  # (trials, part of the epochs that each trains for)
BASELINE = "ce"


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
        return tuned + [run_of(options, seed=seed, **winner) for seed in seeds for winner in winners]

    def choices(self, records: Sequence[Record]) -> list[Choice]:
        """The losses with results, the best first."""
        found: dict[str, list[Record]] = {}
        for record in records:
            found.setdefault(record.configuration["flags"]["loss"], []).append(record)
        chosen = [choice for loss, runs in found.items() if (choice := _choice(loss, runs)).runs]
        metric = metric_of(records)
        return sorted(chosen, key=lambda choice: -_mean(choice, metric))

    def claims(self, found: Sequence[Choice]) -> list[Claim]:
        if not found:
            return []
        metric = metric_of(list(found[0].runs.values()))
        best, *others = found
        return [
            self.versus(f"{best.loss} is better than {other.loss}.", best, other, best.loss, other.loss, metric)
            for other in others
        ]

    def settle(self, claims: Sequence[Claim | Note]) -> tuple[Note, ...]:
        """Any two losses might have been compared, as the best is found by looking: all pairs share the error."""
        notes = settle(claims, count=comb(len(claims) + 1, 2))
        return tuple(replace(note, beyond=True) for note in notes)

    def report(self, records: Sequence[Record]) -> Findings:
        found, metric = self.choices(records), metric_of(records)
        claims = self.claims(found)
        notes = self.settle(claims)
        return Findings(
            tables=(_ranking(found, notes, metric), _tuning(found, metric)),
            notes=(*_advice(found, notes), *notes),
            protocol=_protocol(found, metric),
            commands=display.commands(self.NAME, records)[:1],
        )


def _halving(
    options: Options, loss: str, finished: Mapping[str, Record]
) -> tuple[list[Configuration], dict[str, Any] | None]:
    """The runs of tuning until now, and the flags that it ends with once all of them are known."""
    left = list(trials(options, loss))
    wanted: list[Configuration] = []
    for count, part in RUNGS:
        runs = [_short(options, part, loss=loss, seed=TUNING_SEED, **trial) for trial in left[:count]]
        first = finished.get(canonical(runs[0]))
        if not wanted and (first is None or first.error):
            return runs[:1], None  # a loss that does not take this data says so once; the page tells why
        wanted += runs
        records = [finished.get(canonical(run)) for run in runs]
        if any(record is None for record in records):
            return wanted, None
        scored = [(record, trial) for record, trial in zip(records, left, strict=False) if record and not record.error]
        metric = metric_of([record for record, _ in scored])
        scored.sort(key=lambda one: -score(one[0], metric, "validation"))
        left = [trial for _, trial in scored]
    return wanted, {"loss": loss, **left[0]} if left else None


def _short(options: Options, part: int, **flags: Any) -> Configuration:
    """A run of a part of the epochs; without warm-up where that would be most of it."""
    base = {**base_flags(options), **options.flags}
    epochs = max(1, base.get("epochs", 300) // part)
    warmup = base.get("warmup_epochs", 5)
    changes = {"epochs": epochs, "warmup_epochs": warmup if 2 * warmup < epochs else 0}
    return run_of(replace(options, flags={**options.flags, **changes}), **flags)


def trials(options: Options, loss: str) -> list[Trial]:
    """Return the trials of a loss, the same number for every loss, spread over its grid and the learning rates."""
    grid = grid_of(loss)
    if len(grid) > TRIALS:
        grid = [grid[i * len(grid) // TRIALS] for i in range(TRIALS)]
    each = -(-TRIALS // len(grid))
    base = {**base_flags(options), **options.flags}
    pairs: list[Trial] = [merge(point, {"lr": lr}) for lr in rates(str(base.get("opt", "sgd")), each) for point in grid]
    # the middle rates first: of a number that the grid does not divide, the outermost are left out
    order = sorted(range(len(pairs)), key=lambda i: abs(i - (len(pairs) - 1) / 2))
    return [pairs[i] for i in order[:TRIALS]]


def metric_of(records: Sequence[Record]) -> str:
    """The metric that the runs were asked to be best in."""
    for record in records:
        return record.configuration["flags"].get("eval_metric", "top1")
    return "top1"


def _choice(loss: str, records: Sequence[Record]) -> Choice:
    tried = tuple(record for record in records if seed_of(record) == TUNING_SEED)
    runs = {seed_of(record): record for record in records if seed_of(record) != TUNING_SEED}
    flags = next(iter(runs.values()), records[0]).configuration["flags"]
    trial = {name: flags[name] for name in ("lr", "loss_opt", "normalize_classifier") if name in flags}
    rest = {name: value for name, value in flags.items() if name not in (*trial, "seed", "loss")}
    return Choice(loss, rest, trial, runs, tried)


def _mean(choice: Choice, metric: str) -> float:
    value = choice.estimate(metric)
    assert value is not None
    return value.mean


def _ranking(found: Sequence[Choice], notes: Sequence[Note], metric: str) -> Table:
    best = found[0].scores(metric) if found else {}
    others = ({"agrees": "worse", "same": "as good"}.get(note.verdict, "not sure") for note in notes)
    excess = f"excess_{metric}"  # above the least error there is, where the data's posterior is known
    known = any(
        f"test_{excess}" in row for choice in found for one in choice.runs.values() for row in one.result["history"]
    )
    rows = [
        (
            choice.loss,
            choice.estimate(metric),
            choice.estimate(excess, by=metric) if known else None,
            None if choice is found[0] else estimate(list(paired(choice.scores(metric), best).values())),
            verdict,
            display.spelt(choice.trial),
            sum(record.seconds for record in choice.runs.values()) / len(choice.runs),
        )
        for choice, verdict in zip(found, chain([""], others), strict=False)
    ]
    name = display.metric_name(metric)
    return Table(
        "Ranking",
        ("loss", name, "excess risk", "less the best", "than the best", "setting", "seconds"),
        tuple(rows),
        f"Percent on the {_split(found)} split, mean over seeds with its 95 % interval. The verdicts beside the best "
        "are corrected for all pairs of losses and for repeated looks. Excess risk, where the data's posterior is "
        "known: the error above the least that any classifier has. Seconds: of one full run, evaluation included.",
        compared=(name,),
    )


def _tuning(found: Sequence[Choice], metric: str) -> Table:
    rows = []
    for choice in found:
        epochs = sum(record.configuration["flags"]["epochs"] for record in choice.trials)
        best = best_of(choice.trials, metric)
        reached = score(best, metric, "validation") if best else None
        rows.append((choice.loss, len(choice.trials), epochs, reached, len(choice.runs)))
    columns = ("loss", "tuning runs", "epochs of tuning", f"best validation {display.metric_name(metric)}", "seeds")
    return Table("Tuning", columns, tuple(rows), f"On seed {TUNING_SEED}, which no result is of.")


def _advice(found: Sequence[Choice], notes: Sequence[Note]) -> list[Note]:
    """The recommendation and its certainty, in one claim."""
    if not found:
        return []
    best, others = found[0], [choice.loss for choice in found[1:]]
    with_verdict = {
        verdict: [loss for loss, note in zip(others, notes, strict=True) if note.verdict == verdict]
        for verdict in ("agrees", "same", "open")
    }
    words = [f"It is surely better than {_listed(with_verdict['agrees'])}."] if with_verdict["agrees"] else []
    if with_verdict["same"]:
        words.append(f"No difference larger than a point from {_listed(with_verdict['same'])}.")
    if with_verdict["open"]:
        words.append(f"Not told apart from {_listed(with_verdict['open'])}: add seeds with --max-seeds 40.")
    if BASELINE in others and BASELINE not in with_verdict["agrees"]:
        words.append("Cross-entropy may do as well: nothing here asks for a change.")
    text = f"Take {best.loss} with {display.spelt(best.trial)}."
    return [Note(text, "open" if with_verdict["open"] else "agrees", " ".join(words) or "Nothing to compare.", True)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _split(found: Sequence[Choice]) -> str:
    return next(iter(found[0].runs.values())).configuration["test_split"] if found else "test"


def _protocol(found: Sequence[Choice], metric: str) -> str:
    if not found:
        return ""
    flags = found[0].flags
    rungs = ", then ".join(f"{count} trials for 1/{part} of the epochs" for count, part in RUNGS)
    return (
        f"Data {flags.get('dataset') or flags.get('data_dir')}, network {flags.get('model')}, {flags.get('epochs')} "
        f"epochs. Every loss is tuned alike, over its own grid and the learning rate, by successive halving: {rungs}, "
        f"judged by {display.metric_name(metric)} on the validation split. The best trains in full on other seeds. In "
        "every run the epoch that is best on the validation split is taken, and the other split is reported."
    )


STUDY = Compare()
