"""Tables and pictures that the training studies share."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from topk_registry.studies.statistics import difference, judge
from topk_registry.studies.study import Estimate, Figure, Note, Record, Table, Value
from topk_registry.studies.tuning import Choice, score

UNCHECKED = (
    "Cells of the paper are empty where its number could not be checked against its text; see {reference} for them, which "
    "are of other data and networks in any case."
)

Key = Callable[[Choice], Any]
Name = Callable[[Choice], str]
Match = Callable[[Choice], bool]
Paper = Mapping[tuple[Any, str, str], float]  # (the row's key, loss, metric) -> the paper's number


def loss_name(choice: Choice) -> str:
    return choice.loss


def accuracy_table(
    title: str,
    key_name: str,
    key: Key,
    found: Sequence[Choice],
    metrics: Sequence[str],
    reference: str,
    *,
    paper: Paper | None = None,
    note: str = "",
    name: Name = loss_name,
) -> Table:
    """One row a key and loss; beside each metric the paper's number."""
    paper = paper or {}
    columns, theirs = [key_name, "loss"], []
    for metric in metrics:
        theirs.append(f"{metric_name(metric)}, paper")
        columns += [metric_name(metric), theirs[-1]]
    rows = []
    for choice in found:
        cells: list[Value] = [key(choice), name(choice)]
        for metric in metrics:
            cells += [choice.estimate(metric), paper.get((key(choice), choice.loss, metric))]
        rows.append((*cells, len(choice.runs)))
    note = " ".join(filter(None, [note, "Percent, mean over seeds ± 95 % interval.", UNCHECKED.format(reference=reference)]))
    return Table(title, (*columns, "seeds"), tuple(rows), note, tuple(theirs))


def trials_table(found: Sequence[Choice], key_name: str, key: Key, metric: str, *, name: Name = loss_name) -> Table:
    """What tuning chose, and what it was worth: the validation score of the best and of the worst trial."""
    rows = []
    for choice in found:
        scores = [score(record, metric, "validation") for record in choice.trials]
        rows.append((key(choice), name(choice), spelt(choice.trial), len(scores), max(scores), min(scores)))
    columns = (key_name, "loss", "chosen", "trials", f"best {metric_name(metric)}", "worst")
    return Table("What tuning chose", columns, tuple(rows), "Validation split, first seed, best epoch, percent.")


def differences_table(
    found: Sequence[Choice], key_name: str, key: Key, metrics: Sequence[str], *, baseline: str = "ce", name: Name = loss_name
) -> Table:
    """Every loss less the baseline under the same key, seed by seed."""
    base = {key(choice): choice for choice in found if choice.loss == baseline}
    rows = []
    for choice in found:
        other = base.get(key(choice))
        if choice.loss != baseline and other is not None:
            gaps = [difference(choice.scores(metric), other.scores(metric)) for metric in metrics]
            rows.append((key(choice), name(choice), *gaps))
    return Table(
        f"Difference from {baseline}",
        (key_name, "loss", *map(metric_name, metrics)),
        tuple(rows),
        "Percentage points on the test split, paired by seed; an interval that excludes 0 is a difference at the 95 % "
        "level for this one comparison.",
    )


def judge_losses(
    claim: str, found: Sequence[Choice], better: Match, worse: Match, metric: str, words: str
) -> tuple[Note, ...]:
    """A note on one choice against another; none where either is missing."""
    first, second = next(filter(better, found), None), next(filter(worse, found), None)
    if first is None or second is None:
        return ()
    return (judge(claim, difference(first.scores(metric), second.scores(metric)), f"{metric_name(metric)}, {words}"),)


def lines_figure(
    title: str,
    key_name: str,
    key: Key,
    found: Sequence[Choice],
    metric: str,
    *,
    log: bool = False,
    name: Name = loss_name,
) -> Figure:
    """A metric against a number, one line a loss, with confidence intervals."""
    lines: dict[str, list[tuple[float, Estimate]]] = {}
    for choice in found:
        value = choice.estimate(metric)
        if value is not None:
            lines.setdefault(name(choice), []).append((float(key(choice)), value))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for line, points in lines.items():
            points.sort(key=lambda point: point[0])
            errors = [0.0 if math.isnan(value.half_width) else value.half_width for _, value in points]
            x, y = [place for place, _ in points], [value.mean for _, value in points]
            axes.errorbar(x, y, yerr=errors, marker="o", capsize=3, label=line)
        axes.set_xlabel(key_name)
        axes.set_ylabel(f"test {metric_name(metric)} (%)")
        if log:
            axes.set_xscale("log")
        axes.legend()
        axes.grid(alpha=0.3)

    return Figure(title, "Mean over seeds; bars are 95 % confidence intervals (Student's t).", draw)


def curves_figure(
    title: str, caption: str, runs: Mapping[str, Record], panels: Sequence[tuple[str, str]], *, log: Iterable[str] = ()
) -> Figure:
    """Columns of the history against the epoch, one panel a column, one line a run."""
    logarithmic = set(log)

    def draw(figure: Any) -> None:
        for axes, (name, words) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for run_label, record in runs.items():
                rows = [row for row in record.result["history"] if name in row]
                axes.plot([row["epoch"] + 1 for row in rows], [row[name] for row in rows], marker=".", label=run_label)
            axes.set_xlabel("epoch")
            axes.set_title(words)
            if name in logarithmic:
                axes.set_yscale("log")
            axes.grid(alpha=0.3)
        figure.axes[0].legend(fontsize="small")

    return Figure(title, caption, draw, (4.5 * len(panels), 4.0))


def protocol(found: Sequence[Choice], metric: str = "top5") -> str:
    """How the numbers came about, read from the runs' own configurations."""
    if not found:
        return ""
    record = next(iter(found[0].runs.values()))
    flags = record.configuration["flags"]
    trials = sorted({len(choice.trials) for choice in found})
    seeds = sorted({seed for choice in found for seed in choice.runs})
    epochs = sorted({choice.flags.get("epochs") for choice in found})
    grid = f"a grid of {_span(trials)} trials" if trials[-1] > 1 else "one setting, not tuned"
    return (
        f"Data {flags.get('dataset') or flags.get('data_dir')}, network {flags.get('model')}, {_span(epochs)} epochs, "
        f"seeds {', '.join(map(str, seeds))}. Each row of a table has {grid} on the first seed; the trial with the best "
        f"validation {metric_name(metric)} runs on all seeds. In every run, cross-entropy's included, the epoch that is "
        "best on the validation split is taken (early stopping), separately for each metric. The numbers are of the "
        f"{record.configuration['test_split']} split, which chose nothing. Labels are made noisy, and classes thinned "
        "out, in training alone."
    )


def spelt(flags: Mapping[str, Any]) -> str:
    """Flags in a few words, options of the loss among them."""
    words = []
    for name, value in flags.items():
        if isinstance(value, Mapping):
            words.append(spelt(value))
        elif value is not None:
            words.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return " ".join(filter(None, words))


def metric_name(metric: str) -> str:
    """``macro_top5`` as it is read."""
    return metric.replace("_", " ").replace("top", "top-")


def _span(values: Sequence[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
