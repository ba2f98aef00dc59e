"""A picture of all claims about differences: each with its interval on one axis, the paper's value beside it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBER = re.compile(r"^(?P<words>.*): (?P<mean>[+-][0-9.]+) ± (?P<half>[0-9.]+) (?P<unit>points|classes)")
AXES = {"points": "points of accuracy", "classes": "classes in a set"}
LOOKS = {  # of each verdict: its words, colour, marker, and whether the marker is filled
    "agrees": ("agrees with the paper", "#15956b", "o", True),
    "differs": ("differs", "#d9540b", "D", True),
    "same": ("no difference that matters", "#0a7fc2", "s", True),
    "open": ("open", "#808080", "o", False),
}
LINEAR = 2.0  # points up to which the axis is linear; beyond, distances shrink as logarithms do
TICKS = (-30, -10, -5, -2, -1, 0, 1, 2, 5, 10, 30, 80)


@dataclass(frozen=True)
class Difference:
    """A claim that is a difference: of what, in which unit, with the half width of its interval."""

    study: str
    words: str
    mean: float
    half: float
    verdict: str
    paper: float | None
    unit: str = "points"


def differences(summaries: Iterable[Mapping[str, Any]]) -> list[Difference]:
    """Read the differences of the studies' notes; claims about other numbers are left out."""
    gaps = []
    for summary in summaries:
        for note in summary["notes"]:
            if match := NUMBER.match(note["evidence"]):
                paper = float(note["paper"]) if note.get("paper") else None
                numbers = float(match["mean"]), float(match["half"])
                gaps.append(
                    Difference(summary["title"], match["words"], *numbers, note["verdict"], paper, match["unit"])
                )
    return gaps


def picture(gaps: Sequence[Difference]) -> "Figure":
    """Draw one line a difference, in the order of the table, under the titles of their studies."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    places: list[int] = []
    titles: list[tuple[int, str]] = []
    y = 0
    for i, each in enumerate(gaps):
        if not i or each.study != gaps[i - 1].study:
            titles.append((y, each.study))
            y += 1
        places.append(y)
        y += 1
    units = dict.fromkeys(each.unit for each in gaps)
    figure = Figure(figsize=(9.0, 0.9 + 0.215 * y), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="0.4", linewidth=0.9)
    for place, each in zip(places, gaps, strict=True):
        _, colour, marker, filled = LOOKS[each.verdict]
        face = colour if filled else "none"
        axes.errorbar(
            each.mean,
            place,
            xerr=each.half,
            color=colour,
            marker=marker,
            markerfacecolor=face,
            markersize=5,
            capsize=2.5,
        )
        if each.paper is not None:
            axes.plot(each.paper, place, color="0.1", marker="x", markersize=6, linestyle="none")
    axes.set_xscale("symlog", linthresh=LINEAR)
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high], minor=False)
    axes.set_xticklabels([f"{tick:+d}" if tick else "0" for tick in TICKS if low <= tick <= high])
    axes.minorticks_off()
    axes.set_yticks(places + [at for at, _ in titles], [each.words for each in gaps] + [words for _, words in titles])
    for label in axes.get_yticklabels()[len(places) :]:
        label.set_fontweight("bold")
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.set_ylim(y - 0.4, -0.6)
    axes.grid(axis="x", linewidth=0.5, color="0.85")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"{', '.join(AXES[unit] for unit in units)}; above 0 the claim holds")
    shown = [look for verdict, look in LOOKS.items() if any(each.verdict == verdict for each in gaps)]
    handles = [
        Line2D([], [], color=colour, marker=marker, markerfacecolor=colour if filled else "none", label=words)
        for words, colour, marker, filled in shown
    ]
    if any(each.paper is not None for each in gaps):
        handles.append(Line2D([], [], color="0.1", marker="x", linestyle="none", label="the paper's value"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    return figure
