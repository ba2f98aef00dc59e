"""Report of a comparison of losses: the ranking, how each loss was tuned, and what to take."""

from collections.abc import Sequence
from itertools import chain

from topk_studies.engine.statistics import LOOKS, estimate, paired
from topk_studies.engine.study import Note, Table
from topk_studies.engine.tuning import TUNING_SEED, Choice
from topk_studies.experiments.compare_doubts import of_the_metric, of_the_tuning, rungs
from topk_studies.report import display

BASELINE = "ce"
RECOMMENDED = "A run of the loss that was ahead, with the setting that tuning chose"
BESIDE = {"agrees": "worse", "same": "as good", "none": "no verdict"}


def mean_of(choice: Choice, metric: str) -> float:
    value = choice.estimate(metric)
    assert value is not None
    return value.mean


def ranking(choices: Sequence[Choice], notes: Sequence[Note], metric: str) -> Table:
    best = choices[0].scores(metric) if choices else {}
    others = (BESIDE.get(note.verdict, "not sure") for note in notes)
    excess = f"excess_{metric}"  # above the least error there is, where the data's posterior is known
    known = any(
        f"test_{excess}" in row for choice in choices for one in choice.runs.values() for row in one.result["history"]
    )
    rows = [
        (
            choice.loss,
            choice.estimate(metric),
            choice.estimate(excess, by=metric) if known else None,
            None if choice is choices[0] else estimate(list(paired(choice.scores(metric), best).values())),
            verdict,
            display.spelt(choice.trial),
            sum(record.seconds for record in choice.runs.values()) / len(choice.runs),
        )
        for choice, verdict in zip(choices, chain([""], others), strict=False)
    ]
    name = display.metric_name(metric)
    excess_note = (
        " Excess risk: the error above the least that any classifier has, as the data's posterior is known."
        if known
        else ""
    )
    return Table(
        "Ranking",
        ("loss", name, "excess risk", "less the best", "than the best", "setting", "seconds"),
        tuple(rows),
        f"Percent on the {_split(choices)} split, mean over seeds, from three seeds on with its 95 % interval. The "
        "verdicts beside the best are corrected for all pairs of losses and for repeated looks."
        f"{excess_note} Seconds: of one full run, evaluation included.",
        compared=(name,),
    )


def tuning(choices: Sequence[Choice], metric: str) -> Table:
    rows = []
    for choice in choices:
        epochs = sum(record.configuration["flags"]["epochs"] for record in choice.trials)
        reached = max((score for rung in rungs(choice) for score in rung.scores.values()), default=None)
        doubts = " ".join(doubt.reason.removeprefix(f"{choice.loss}: ") for doubt in of_the_tuning(choice))
        rows.append((choice.loss, len(choice.trials), epochs, reached, len(choice.runs), doubts))
    best = f"best validation {display.metric_name(metric)}"
    columns = ("loss", "tuning runs", "epochs of tuning", best, "seeds", "in doubt")
    return Table("Tuning", columns, tuple(rows), f"On seed {TUNING_SEED}, which no result is of.")


def advice(choices: Sequence[Choice], notes: Sequence[Note], metric: str) -> list[Note]:
    """The recommendation and its certainty, in one claim; none where the best loss is in doubt."""
    if not choices:
        return []
    best, others = choices[0], [choice.loss for choice in choices[1:]]
    setting = f"{best.loss} with {display.spelt(best.trial)}"
    doubts = [*of_the_metric(best), *of_the_tuning(best)]
    if doubts or (notes and all(note.verdict == "none" for note in notes)):
        words = [*map(str, doubts), f"Ahead in these runs: {setting}."]
        return [Note("No verdict on which loss to take.", "none", " ".join(words), True)]
    by_verdict = {
        verdict: [loss for loss, note in zip(others, notes, strict=True) if note.verdict == verdict]
        for verdict in ("agrees", "same", "open", "none")
    }
    words = [f"It is surely better than {_listed(by_verdict['agrees'])}."] if by_verdict["agrees"] else []
    if by_verdict["same"]:
        words.append(f"No difference larger than a point from {_listed(by_verdict['same'])}.")
    if by_verdict["open"]:
        words.append(f"Not told apart from {_listed(by_verdict['open'])}: add seeds with --max-seeds {LOOKS[-1]}.")
    if by_verdict["none"]:
        words.append(f"No verdict on {_listed(by_verdict['none'])}, for the reasons below.")
    if BASELINE in others and BASELINE not in by_verdict["agrees"]:
        words.append("Cross-entropy may do as well: nothing here asks for a change.")
    verdict = "open" if by_verdict["open"] or by_verdict["none"] else "agrees"
    return [Note(f"Take {setting}.", verdict, " ".join(words) or "Nothing to compare.", True)]


def protocol(choices: Sequence[Choice], metric: str, rungs: Sequence[tuple[int, int]]) -> str:
    if not choices:
        return ""
    flags = choices[0].flags
    rounds = ", then ".join(f"{count} trials for 1/{part} of the epochs" for count, part in rungs)
    return (
        f"Data {flags.get('dataset') or flags.get('data_dir')}, network {flags.get('model')}, {flags.get('epochs')} "
        f"epochs. Every loss is tuned alike, over its own grid and the learning rate, by successive halving: {rounds}, "
        f"judged by {display.metric_name(metric)} on the validation split. The best trains in full on other seeds. In "
        "every run the epoch that is best on the validation split is taken, and the other split is reported."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _split(choices: Sequence[Choice]) -> str:
    return next(iter(choices[0].runs.values())).configuration["test_split"] if choices else "test"
