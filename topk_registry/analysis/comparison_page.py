"""A comparison as text: the table of a terminal, and a page with plots and pictures."""

from collections.abc import Callable, Sequence
from typing import Any

from topk_registry.analysis.comparison import Against, Comparison, Difference
from topk_registry.pages import Picture, gallery, heading, intervals, page, paragraph, table

Show = Callable[[int], str]  # the data URI of an image's thumbnail, "" where there is none
EXAMPLES = 24
CLASSES = 30
COLUMNS = ("measure", "first", "second", "difference", "95 % interval", "p, corrected", "verdict")


def no_picture(index: int) -> str:
    """Show no image."""
    return ""


def columns_of(comparison: Comparison) -> tuple[str, ...]:
    """The columns of :func:`rows_of`."""
    level = f"{1 - comparison.settings['alpha']:.3g}".replace("0.", "")
    return tuple(name.replace("95", f"{level:<02}") for name in COLUMNS)


def rows_of(differences: Sequence[Difference]) -> list[tuple[str, ...]]:
    """A row a measure, cells as text."""
    return [
        (
            f"{d.measure} ({d.unit})",
            _number(d.first, d.unit),
            _number(d.second, d.unit),
            _signed(d.difference, d.unit),
            f"{_signed(d.low, d.unit)} to {_signed(d.high, d.unit)}",
            f"{d.adjusted:.2g}",
            verdict_of(d),
        )
        for d in differences
    ]


def verdict_of(d: Difference) -> str:
    """The verdict, with the number of images that would decide an open one."""
    if d.verdict != "not decided" or d.images_needed is None:
        return d.verdict
    return f"{d.verdict}; about {_rounded(d.images_needed)} images would"


def summary_of(comparison: Comparison, other: Against) -> str:
    """Which images changed, in a sentence."""
    up, down = len(other.changes.gained), len(other.changes.lost)
    return (
        f"Of {comparison.images} images {up} became right and {down} became wrong by their best class, from "
        f"{comparison.names[0]} to {other.name}."
    )


def told_of(comparison: Comparison) -> str:
    """What the verdicts mean, in a sentence or two."""
    s = comparison.settings
    return (
        f"A difference of {s['margin']:g} percent points matters ({s['margin'] / 100:g} nats, {s['margin']:g} % of the "
        f"first's set size). All verdicts together are right with probability {1 - s['alpha']:g}; intervals are of one "
        f"measure each, by {s['resamples']} resamples of the images."
    )


def comparison_page(found: Comparison, show: Show = no_picture, where: Callable[[int], str] = str) -> str:
    """The text of the page.

    Args:
        found: the comparison.
        show: the thumbnail of an image, by its number.
        where: the file of an image, by its number.
    """
    lead = f"{', '.join(found.names[1:])} beside {found.names[0]}, on {found.images} images of {found.classes} classes."
    sections = [(other.name, _section(found, m, other, show, where)) for m, other in enumerate(found.others, 1)]
    settings = table(("setting", "value"), [(name, str(value)) for name, value in found.settings.items()])
    return page("Comparison of models", lead, [*sections, ("Settings", paragraph(told_of(found)) + settings)])


def _section(comparison: Comparison, m: int, other: Against, show: Show, where: Callable[[int], str]) -> str:
    points = [d for d in other.differences if d.unit == "%"]
    margin = comparison.settings["margin"]
    plot = intervals(
        [(d.measure, d.low, d.difference, d.high) for d in points],
        label=f"Differences of accuracy, {other.name} less {comparison.names[0]}",
        of="percent points, the margin shaded",
        band=(-margin, margin),
    )
    columns = [
        comparison.names[0] if c == "first" else other.name if c == "second" else c for c in columns_of(comparison)
    ]
    body = table(columns, rows_of(other.differences)) + plot
    changed = other.changes
    body += heading("Images that changed") + paragraph(summary_of(comparison, other))
    if changed.by_class:
        rows = [tuple(row.values()) for row in changed.by_class[:CLASSES]]
        more = len(changed.by_class) - len(rows)
        body += table(("class", "images", "became right", "became wrong"), rows)
        body += paragraph(f"{more} further classes changed.") if more else ""
    for title, indices in (("Became right", changed.gained), ("Became wrong", changed.lost)):
        if len(indices):
            chosen = [_example(comparison, m, int(i), show, where) for i in indices[:EXAMPLES]]
            body += heading(f"{title}: {len(chosen)} of {len(indices)}") + gallery(chosen)
    return body


def _example(comparison: Comparison, m: int, i: int, show: Show, where: Callable[[int], str]) -> Picture:
    names, label = comparison.class_names, comparison.class_names[comparison.labels[i]]
    before, after = names[comparison.predicted[0][i]], names[comparison.predicted[m][i]]
    return Picture(show(i), f"{label}: {before} → {after}", f"{where(i)}, of class {label}: {before}, then {after}")


def _number(value: float, unit: str) -> str:
    return f"{value:.4f}" if unit == "nats" else f"{value:.2f}"


def _signed(value: Any, unit: str) -> str:
    return f"{value:+.4f}" if unit == "nats" else f"{value:+.2f}"


def _rounded(count: int) -> str:
    """A number of images to two digits."""
    digits = max(0, len(str(count)) - 2)
    return f"{round(count, -digits):,}".replace(",", " ")
