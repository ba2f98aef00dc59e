"""Write the tables of pages from the JSON files of the studies on real pictures.

    python -m topk_studies.tables docs/results README.md docs/choose.md docs/reference/results.md

A page has a line such as ``<!-- icons: ranked -->``, ``<!-- icons-network: differences -->``, ``<!-- all: noisy -->``,
``<!-- networks: noisy -->`` or ``<!-- finetune: recipes -->`` above each table, and a line ``<!-- end -->`` below the
table.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from topk_studies.runner import paired

LEVEL = 0.05
PLACE = re.compile(r"(<!-- ([\w-]+): (ranked|differences|noisy|recipes) -->\n).*?(<!-- end -->)", re.S)
TITLES = {"icons": "icons", "fashion": "Fashion-MNIST", "cifar10n": "CIFAR-10N"}
NETWORKS = {"icons-network": "100 names of icons", "fashion-network": "Fashion-MNIST"}
OTHERS = (*NETWORKS, "finetune")  # files that are not in the table of all data sets
FEW = ("ce", "ce, label smoothing 0.1", "generalised_cross_entropy, tuned", "smooth_topk_svm, tuned")
SMALL = ("ce", "aldr_kl, tuned", "generalised_cross_entropy, tuned", "noised_topk_imbalanced, tuned")
SMALL += ("smooth_topk_svm, tuned", "smooth_topk_svm, k = [1, k], tuned")
NOISY = {"all": (TITLES, FEW), "networks": (NETWORKS, SMALL)}  # data sets and rows of the tables of noisy labels
Document = Mapping[str, Any]


def p_value(t: float, degrees: int) -> float:
    """Return the two-sided p value of a t statistic.

    The density of the angle a with t = sqrt(degrees) tan(a) is proportional to cos(a)^(degrees - 1).

    Example:
        >>> round(p_value(2.201, 11), 4)
        0.05
    """

    def integral(start: float) -> float:
        angles = np.linspace(start, math.pi / 2, 20_001)
        return float(np.trapezoid(np.cos(angles) ** (degrees - 1), angles))

    return integral(math.atan(abs(t) / math.sqrt(degrees))) / integral(0.0)


def holm(values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Return for each p value whether Holm's method rejects the hypothesis at the level.

    Example:
        >>> holm([0.03, 0.001, 0.02])
        [False, True, True]
    """
    found = [False] * len(values)
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        if values[i] > level / (len(values) - rank):
            break
        found[i] = True
    return found


def title(row: str, k: int | str) -> str:
    """Return the text of a row in a table."""
    name, _, rest = row.partition(", ")
    shown = "cross-entropy" if name == "ce" else f"`{name}`"
    return ", ".join(filter(None, [shown, rest.replace("[1, k]", f"[1, {k}]")]))


def by_condition(document: Document) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the rows of each condition by name. Rows with a run that diverged are left out."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in document["rows"]:
        cell = found.setdefault(row["condition"], {})
        if not row["diverged"]:
            cell[row["row"]] = row
    return found


def ranked(document: Document) -> str:
    """Return the table of all rows: mean top-1 and top-k in percent with standard errors, over the seeds of all rows.

    The order is the top-k accuracy under the second condition. The best mean of a column is bold.
    """
    table, k = by_condition(document), document["k"]
    seeds = min(row["seeds"] for row in document["rows"])
    columns = [(condition, metric) for condition in table for metric in ("top1", "topk")]
    values = {column: {name: row[column[1]][:seeds] for name, row in table[column[0]].items()} for column in columns}
    best = {column: max(round(fmean(each), 1) for each in cells.values()) for column, cells in values.items()}
    order = sorted(values[columns[-1]], key=lambda name: -fmean(values[columns[-1]][name]))
    lines = [["Loss", *(f"{condition}: top-{1 if metric == 'top1' else k}" for condition, metric in columns)]]
    for name in [*order, *(each for each in values[columns[0]] if each not in order)]:
        shown = [title(name, k)]
        for column in columns:
            if name not in values[column]:
                shown.append("diverged")
                continue
            each = values[column][name]
            mean = f"{fmean(each):.1f}"
            mean = f"**{mean}**" if round(fmean(each), 1) == best[column] else mean
            shown.append(f"{mean} ± {stdev(each) / math.sqrt(len(each)):.1f}" if len(each) > 1 else mean)
        lines.append(shown)
    return markdown(lines)


def differences(document: Document) -> str:
    """Return the table of the main rows: differences from cross-entropy with 95 % intervals, over the same seeds.

    Columns are top-1, top-k and the mean size of prediction sets. An asterisk marks a difference in top-k that Holm's
    method finds among the main rows of the condition.
    """
    table, k = by_condition(document), document["k"]
    metrics = {"top1": "top-1", "topk": f"top-{k}", "set_size": "classes per set"}
    columns = [(condition, metric) for condition in table for metric in metrics]
    names = [row["row"] for row in document["rows"] if row["main"]]
    lines = [["Loss", *(f"{condition}: {metrics[metric]}" for condition, metric in columns)]]
    lines.append(["cross-entropy", *(f"{fmean(table[c]['ce'][m]):.{1 + (m == 'set_size')}f}" for c, m in columns)])
    found = {condition: _found(table[condition], names) for condition in table}
    for name in dict.fromkeys(names):
        shown = [title(name, k)]
        for condition, metric in columns:
            if name not in table[condition]:
                shown.append("diverged")
                continue
            gap = paired(table[condition][name][metric], table[condition]["ce"][metric])
            mark = "\\*" if metric == "topk" and found[condition].get(name) else ""
            digits = 1 + (metric == "set_size")
            half = f" ± {gap['half_width']:.{digits}f}" if "half_width" in gap else ""
            shown.append(f"{gap['difference']:+.{digits}f}{half}{mark}")
        lines.append(shown)
    return markdown(lines)


def _found(cell: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, bool]:
    tested = [name for name in dict.fromkeys(names) if name in cell and cell[name]["seeds"] > 1]
    values = []
    for name in tested:
        gaps = np.subtract(cell[name]["topk"], cell["ce"]["topk"])
        error = gaps.std(ddof=1) / math.sqrt(len(gaps))
        values.append(p_value(gaps.mean() / error, len(gaps) - 1) if error else 1.0)
    return dict(zip(tested, holm(values), strict=True))


def noisy(documents: Mapping[str, Document], titles: Mapping[str, str], rows: Sequence[str]) -> str:
    """Return the table of some rows under the second condition of each data set: top-k and top-1 in percent."""
    lines = [["Accuracy in %", *(title(name, "k") for name in rows)]]
    for data, shown in titles.items():
        document = documents[data]
        condition, cell = list(by_condition(document).items())[-1]
        for metric, k in (("topk", document["k"]), ("top1", 1)):
            means = [round(fmean(cell[name][metric]), 1) for name in rows]
            cells = [f"**{mean}**" if mean == max(means) else f"{mean}" for mean in means]
            lines.append([f"{shown}, {condition}: top-{k}", *cells])
    return markdown(lines)


def evidence(loss: str, documents: Mapping[str, Document]) -> str:
    """Return the sentences on a loss for its docstring: means over the seeds of all rows. Tuned rows come first."""
    networks = [each for each in NETWORKS if any(row["loss"] == loss for row in documents[each]["rows"])]
    names = {**TITLES, **NETWORKS}
    parts = []
    for data in (*TITLES, *networks):
        document = documents[data]
        seeds = min(row["seeds"] for row in document["rows"])
        cells = by_condition(document).values()

        def means(*names: str, cells: Any = cells, seeds: int = seeds) -> str:
            rows = [next((cell[name] for name in names if name in cell), None) for cell in cells]
            return " and ".join("diverged" if row is None else f"{fmean(row['topk'][:seeds]):.1f}" for row in rows)

        parts.append(f"top-{document['k']} on {names[data]} {means(f'{loss}, tuned', loss)} ({means('ce')})")
    what = "accuracy in % with clean and with noisy labels, and in parentheses with cross-entropy"
    found = f"In this project's study on pictures, {what}: {', '.join(parts[: len(TITLES)])}."
    return f"{found} With a small network from scratch: {', '.join(parts[len(TITLES) :])}." if networks else found


def several_k(document: Document) -> str:
    """Return the sentences on ``smooth_topk_svm`` with k = [1, k] and its top-1 accuracy, from the study ``icons``."""
    k, seeds = document["k"], min(row["seeds"] for row in document["rows"])
    (_, clean), (noise, noisy_rows) = by_condition(document).items()
    both = "smooth_topk_svm, k = [1, k]"

    def mean(cell: Mapping[str, Mapping[str, Any]], name: str, metric: str) -> str:
        return f"{fmean(cell[name][metric][:seeds]):.1f}"

    top1 = [mean(clean, name, "top1") for name in (both, "smooth_topk_svm", "ce")]
    topk = [mean(noisy_rows, name, "topk") for name in (both, f"{both}, tuned", "smooth_topk_svm", "ce")]
    return (
        f"On icons with clean labels, top-1 accuracy is {top1[0]} % with k = [1, {k}], {top1[1]} % with k = {k} and "
        f"{top1[2]} % with cross-entropy. With {noise}, top-{k} accuracy is {topk[0]} % with k = [1, {k}] ({topk[1]} % "
        f"with tuned tau), {topk[2]} % with k = {k} and {topk[3]} % with cross-entropy."
    )


def recipes(document: Document) -> str:
    """Return the table of the study ``finetune``: top-1 and top-5 of each seed in percent, and the means."""
    rows = document["rows"]
    seeds = [f"seed {seed}" for seed in rows[0]["seeds"]]
    lines = [["Settings", "Accuracy in %", *seeds, "mean"]]
    for metric, shown in (("top5", "top-5"), ("top1", "top-1")):
        for row in rows:
            name = (
                "defaults of `timm train`, 15 epochs" if row["recipe"] == "defaults" else f"`--config {row['recipe']}`"
            )
            values = [*row[metric], fmean(row[metric])]
            lines.append([name, shown, *(f"{value:.1f}" for value in values)])
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest]) + "\n"


def read(folder: Path) -> dict[str, Any]:
    """Return the JSON files of the studies by name."""
    paths = {name: folder / f"{name}.json" for name in (*TITLES, *OTHERS)}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def filled(page: str, documents: Mapping[str, Document]) -> str:
    """Return the text of a page with the tables of the documents."""
    write = {"ranked": ranked, "differences": differences, "recipes": recipes}

    def table(place: re.Match[str]) -> str:
        if place[3] == "noisy":
            return place[1] + noisy(documents, *NOISY[place[2]]) + place[4]
        return place[1] + write[place[3]](documents[place[2]]) + place[4]

    return PLACE.sub(table, page)


def main(folder: Path, *pages: Path) -> None:
    documents = read(folder)
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8"), documents), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
