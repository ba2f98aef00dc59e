"""Tables, pictures and sentences that the training studies share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from topk_studies.engine.statistics import difference
from topk_studies.engine.study import Estimate, Figure, Record, Table, Value
from topk_studies.engine.training import command
from topk_studies.engine.tuning import SMALLER, Choice, better, score
from topk_studies.report.plots import legend, lines

Key = Callable[[Choice], Any]
Name = Callable[[Choice], str]
Paper = Mapping[tuple[Any, str], float]  # (the row's key, the column's name) -> a paper's number

TRAINING_PANELS = (
    ("train_top5", "training top-5 (%)"),
    ("top5", "validation top-5 (%)"),
    ("nonzero", "gradient not zero"),
)
QUALITY = {  # measured besides accuracy, by the names of the histories' columns
    "excess_top5": "excess top-5",
    "excess_top1": "excess top-1",
    "calibration_top5": "calibration error",
    "set_mean_size": "set size",
}
UNCHECKED = (
    "The paper's own numbers, of other data and networks, are in {}: none is repeated here that was not checked."
)


def loss_name(choice: Choice) -> str:
    return choice.loss


def grid_table(
    title: str,
    key_name: str,
    key: Key,
    choices: Sequence[Choice],
    metric: str,
    reference: str,
    *,
    name: Name = loss_name,
    paper: Paper | None = None,
    note: str = "",
) -> Table:
    """A metric: one row a key, one column a loss, and beside it the paper's numbers where there are any."""
    names = list(dict.fromkeys(map(name, choices)))
    place = {(key(choice), name(choice)): choice for choice in choices}
    columns, theirs = [key_name], []
    for each in names:
        columns.append(each)
        if paper and any(column == each for _, column in paper):
            theirs.append(f"{each}, paper")
            columns.append(theirs[-1])
    rows = []
    for row in dict.fromkeys(map(key, choices)):
        cells: list[Value] = [row]
        for each in names:
            cells.append(place[row, each].estimate(metric) if (row, each) in place else None)
            if f"{each}, paper" in theirs:
                cells.append((paper or {}).get((row, each)))
        rows.append(tuple(cells))
    return Table(
        f"{title}: {metric_name(metric)}",
        tuple(columns),
        tuple(rows),
        _note(note, _accuracy(choices), "" if paper else UNCHECKED.format(reference)),
        tuple(theirs),
        compared=tuple(names),
        along="row",
    )


def list_table(
    title: str,
    choices: Sequence[Choice],
    metrics: Sequence[str],
    reference: str,
    *,
    name: Name = loss_name,
    columns: Mapping[str, Callable[[Choice], Value]] | None = None,
    note: str = "",
) -> Table:
    """One row a choice, one column a metric; ``columns`` are further ones."""
    columns = columns or {}
    names = tuple(map(metric_name, metrics))
    rows = [
        (name(choice), *(choice.estimate(metric) for metric in metrics), *(read(choice) for read in columns.values()))
        for choice in choices
    ]
    return Table(
        title,
        ("", *names, *columns),
        tuple(rows),
        _note(note, _accuracy(choices), UNCHECKED.format(reference)),
        compared=names,
    )


def quality_table(
    key_name: str, key: Key, choices: Sequence[Choice], metric: str, *, name: Name = loss_name
) -> Table | None:
    """Table of the probabilities' calibration and sets, at the epochs that ``metric`` chose; None for older runs."""
    rows = [row for choice in choices for record in choice.runs.values() for row in record.result.get("history", ())]
    measured = [column for column in QUALITY if all(f"test_{column}" in row for row in rows if metric in row)]
    if not rows or not measured:
        return None
    return Table(
        "Beyond accuracy",
        (key_name, "", *(QUALITY[column] for column in measured)),
        tuple((key(c), name(c), *(c.estimate(column, by=metric) for column in measured)) for c in choices),
        "Excess: points of error above the least that any classifier has, where the posterior is known. Calibration "
        "error: of the top-5 marginals, 0 to 2. Set size: classes in prediction sets that hold the label nine times in "
        "ten, calibrated on half of the test split and measured on the other.",
    )


def trials_table(choices: Sequence[Choice], key_name: str, key: Key, metric: str, *, name: Name = loss_name) -> Table:
    """Tabulate the choices of tuning, with the validation scores of the best and the worst trial."""
    rows = []
    for choice in choices:
        scores = [score(record, metric, "validation") for record in choice.trials]
        scores.sort(key=lambda value: better(value, metric))
        rows.append((key(choice), name(choice), spelt(choice.trial), len(scores), scores[-1], scores[0]))
    columns = (key_name, "loss", "chosen", "trials", f"best {metric_name(metric)}", "worst")
    unit = "classes" if metric in SMALLER else "percent"
    return Table("What tuning chose", columns, tuple(rows), f"Validation split, first seed, best epoch, {unit}.")


def differences_table(
    choices: Sequence[Choice],
    key_name: str,
    key: Key,
    metrics: Sequence[str],
    *,
    baseline: str = "ce",
    name: Name = loss_name,
) -> Table:
    """Every loss less the baseline under the same key, seed by seed."""
    base = {key(choice): choice for choice in choices if name(choice) == baseline}
    rows = []
    for choice in choices:
        other = base.get(key(choice))
        if name(choice) != baseline and other is not None:
            gaps = [difference(choice.scores(metric), other.scores(metric)) for metric in metrics]
            rows.append((key(choice), name(choice), *gaps))
    return Table(
        f"Difference from {baseline}",
        (key_name, "loss", *map(metric_name, metrics)),
        tuple(rows),
        "Percentage points on the test split, paired by seed. Where the interval excludes 0, that one comparison is a "
        "difference at the 95 % level; of twenty such, one is expected to be chance.",
    )


def lines_figure(
    title: str,
    key_name: str,
    key: Key,
    choices: Sequence[Choice],
    metric: str,
    *,
    log: bool = False,
    name: Name = loss_name,
) -> Figure:
    """A metric against a number, one line a loss."""
    series: dict[str, list[tuple[float, Value]]] = {}
    for choice in sorted(choices, key=key):
        series.setdefault(name(choice), []).append((float(key(choice)), choice.estimate(metric)))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        lines(axes, series)
        axes.set_xlabel(key_name)
        axes.set_ylabel(f"test {metric_name(metric)} (%)")
        if log:
            axes.set_xscale("log")
        legend(figure, axes)

    return Figure(title, "Mean over seeds with 95 % confidence intervals (Student's t).", draw, alt=_alt(title, series))


def curves_figure(
    title: str,
    caption: str,
    runs: Mapping[str, Record],
    panels: Sequence[tuple[str, str]],
    *,
    log: Sequence[str] = (),
) -> Figure:
    """Columns of the history against the epoch: one panel a column, one line a run."""

    def draw(figure: Any) -> None:
        everything = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (column, words) in zip(everything, panels, strict=True):
            lines(axes, {name: _curve(record, column) for name, record in runs.items()})
            axes.set_xlabel("epoch")
            axes.set_title(words)
            if column in log:
                axes.set_yscale("log")
        legend(figure, everything[0])

    return Figure(title, caption, draw, (4.6 * len(panels), 4.4))


def _curve(record: Record, column: str) -> list[tuple[float, Value]]:
    return [(row["epoch"], row[column]) for row in record.result["history"] if column in row]


def first_runs(choices: Sequence[Choice], name: Name) -> dict[str, Record]:
    """The first seed's run of each choice."""
    return {name(choice): choice.runs[min(choice.runs)] for choice in choices}


def protocol(choices: Sequence[Choice], metric: str = "top5") -> str:
    """How the numbers came about, read from the runs' own configurations."""
    if not choices:
        return ""
    record = next(iter(choices[0].runs.values()))
    flags = record.configuration["flags"]
    trials = sorted({len(choice.trials) for choice in choices})
    seeds = sorted({seed for choice in choices for seed in choice.runs})
    epochs = sorted({int(choice.flags.get("epochs", 0)) for choice in choices})
    grid = (
        f"Each loss has {_span(trials)} trials on the first seed; the trial with the best validation "
        f"{metric_name(metric)} runs on all seeds."
        if trials[-1] > 1
        else "Nothing is tuned: every run has the setting that its row names."
    )
    return (
        f"Data {flags.get('dataset') or flags.get('data_dir')}, network {flags.get('model')}, {_span(epochs)} epochs, "
        f"seeds {', '.join(map(str, seeds))}. {grid} In every run, cross-entropy's included, the epoch that is best on "
        "the validation split is taken (early stopping), separately for each metric. The numbers are of the "
        f"{record.configuration['test_split']} split, which chose nothing. Labels are made noisy, and classes thinned "
        "out, in training alone."
    )


def commands(study: str, records: Sequence[Record]) -> tuple[tuple[str, str], ...]:
    """How to do one of the runs alone, and the study in the papers' own setting."""
    alone = tuple(("One of these runs alone", command(record.configuration)) for record in records[:1])
    paper = f"topk-registry study {study} --budget paper --device cuda"
    return (
        *alone,
        ("The papers' setting on CIFAR-100, which is downloaded into data/", paper),
        ("The papers' setting on ImageNet, a folder of train/ and validation/", f"{paper} --data-dir imagenet"),
        ("How many hours that would be here", f"{paper} --plan"),
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


def _accuracy(choices: Sequence[Choice]) -> str:
    counts = sorted({len(choice.runs) for choice in choices})
    return f"Percent on the test split, mean over {_span(counts)} seeds ± its 95 % interval." if counts else ""


def _note(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _alt(title: str, series: Mapping[str, Sequence[tuple[float, Value]]]) -> str:
    ends = [
        f"{name} from {_mean(points[0][1])} to {_mean(points[-1][1])}"
        for name, points in series.items()
        if len(points) > 1
    ]
    return f"{title}: {'; '.join(ends)}." if ends else title


def _mean(value: Value) -> str:
    return f"{value.mean:.1f}" if isinstance(value, Estimate) else str(value)


def _span(values: Sequence[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
