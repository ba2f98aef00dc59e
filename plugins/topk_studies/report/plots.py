"""How every plot looks: one style, one colour a loss, and SVG that takes the page's ink in light and in dark.

A loss has the same colour, marker and dashes wherever it is drawn. The colours lie between the luminances at which they
would stand out from only one of a white and a dark sheet, and no plot leaves a line to its colour alone.
"""

import base64
import io
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from topk_studies.engine.study import Estimate, Figure, Median, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "plots need matplotlib, of the extra 'study': pip install 'topk-registry[study]'"
COLOURS = ("#0a7fc2", "#d9540b", "#15956b", "#b05fc4", "#a07a12", "#d64545", "#2b93a8", "#d0538f", "#6f7fd6", "#7d8a3a")
MARKERS = "osD^vPX<>"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
INK, GRID = "#1c1d21", "#dcdad4"  # in SVG they stand for the page's own colours, which change with its scheme
PAGE_COLOURS = {INK: "var(--ink, #1c1d20)", GRID: "var(--line, #dcdad3)"}

STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "font.size": 10,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "svg.fonttype": "none",
}


class MissingExtraError(ImportError):
    """A package that plots need is not installed; the message names the extra."""


def require() -> None:
    """Raise :class:`MissingExtraError` where no plot can be drawn, before hours are spent on what it should show."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(INSTALL)


@dataclass(frozen=True)
class Look:
    colour: str
    marker: str
    dashes: Any = "-"


# the losses that the papers' plots put side by side stand furthest apart
LOOKS = {
    "ce": Look("#808080", "o"),
    "smooth_topk_svm": Look(COLOURS[0], "s"),
    "noised_topk": Look(COLOURS[1], "D"),
    "noised_topk_imbalanced": Look(COLOURS[1], "v", DASHES[1]),
    "topk_nll": Look(COLOURS[6], "^"),
    "topk_svm": Look(COLOURS[0], "<", DASHES[1]),
    "topk_hinge_calibrated": Look(COLOURS[3], "P"),
    "topk_hinge": Look(COLOURS[3], "X", DASHES[1]),
    "topk_hinge_convex": Look(COLOURS[3], "<", DASHES[2]),
    "focal": Look(COLOURS[2], "^"),
    "ldam": Look(COLOURS[4], "v"),
    "encouraging": Look(COLOURS[5], "D"),
    "mirror": Look(COLOURS[5], "o", DASHES[1]),
    "sigmoid_mse": Look(COLOURS[9], "s"),
    "sigmoid_mae": Look(COLOURS[9], "X", DASHES[1]),
    "log_spherical_softmax": Look(COLOURS[7], "o"),
    "log_taylor_softmax": Look(COLOURS[7], "s", DASHES[1]),
    "spherical_bound": Look(COLOURS[8], "D"),
    # and the contestants of the studies of speed and of stability
    "F.cross_entropy": Look("#808080", "o"),
    "topk_registry": Look(COLOURS[0], "s"),
    "topk_registry, plain torch": Look(COLOURS[6], "s", DASHES[1]),
    "summation": Look(COLOURS[2], "^"),
    "summation in linear space": Look(COLOURS[2], "v", DASHES[2]),
    "divide and conquer": Look(COLOURS[3], "P"),
    "divide and conquer in linear space": Look(COLOURS[3], "X", DASHES[2]),
    "algorithm 2": Look(COLOURS[5], "D"),
    "authors' code (difftopk)": Look(COLOURS[7], ">", DASHES[1]),
    "pytopk, balanced": Look(COLOURS[4], "<"),
    "difftopk, neuralsort": Look(COLOURS[9], "v"),
}


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Colour, marker and dashes of each name in one plot.

    A loss of ours has its own, everywhere, also with options after its name where the plot has it once; any other name
    has a colour computed from its letters, or the next one that the plot has left.
    """
    losses = [name if name in LOOKS else name.split()[0] for name in names]
    by_name = {
        name: LOOKS[loss] for name, loss in zip(names, losses, strict=True) if loss in LOOKS and losses.count(loss) == 1
    }
    used = {style.colour for style in by_name.values()}
    for name in (name for name in names if name not in by_name):
        start = zlib.crc32(name.encode())
        turn = [COLOURS[(start + i) % len(COLOURS)] for i in range(len(COLOURS))]
        colour = next((colour for colour in turn if colour not in used), turn[0])
        used.add(colour)
        by_name[name] = Look(colour, MARKERS[start % len(MARKERS)], DASHES[len(by_name) // len(COLOURS) % len(DASHES)])
    return by_name


def lines(axes: "Axes", series: Mapping[str, Sequence[tuple[float, Value]]], *, band: bool = True) -> None:
    """One line a name, through its points (x, y); an interval of y is a band around it, or bars.

    A line has a gap where y is no finite number.
    """
    styles = looks(list(series))
    for name, points in series.items():
        style = styles[name]
        shown = [(x, *interval(value)) for x, value in points]
        if not any(math.isfinite(middle) for _, middle, _, _ in shown):
            continue
        x, y, low, high = zip(*shown, strict=True)
        drawn = {"color": style.colour, "label": name, "marker": style.marker, "linestyle": style.dashes}
        if band:
            axes.plot(x, y, **drawn)
            axes.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)
        else:
            below = [max(middle - end, 0) for middle, end in zip(y, low, strict=True)]
            above = [max(end - middle, 0) for middle, end in zip(y, high, strict=True)]
            axes.errorbar(x, y, yerr=[below, above], capsize=3, **drawn)


def interval(value: Any) -> tuple[float, float, float]:
    """(middle, low, high) of a number or of an estimate, NaN where there is none; a single run has no width."""
    if value is None or isinstance(value, str):
        return math.nan, math.nan, math.nan
    if isinstance(value, Median):
        return value.middle, value.low, value.high
    if isinstance(value, Estimate):
        width = 0.0 if value.half_width != value.half_width else value.half_width
        return value.mean, value.mean - width, value.mean + width
    return float(value), float(value), float(value)


def legend(figure: Any, axes: "Axes", *, columns: int = 4) -> None:
    """One legend below all axes of a figure, from the lines of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(len(labels), 1)))


def svg(figure: Figure, *, name: str) -> str:
    """A figure as inline SVG, its text as text, its ink the page's; ``name`` keeps ids apart within a page."""
    drawn = _draw(
        figure, lambda canvas, file: canvas.savefig(file, format="svg", dpi=96, metadata={"Date": None}), name
    )
    text = drawn.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' d="([^"]*)"', lambda path: f' d="{_compact(path[1])}"', text)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r' style="[^"]*"', lambda style: re.sub(r"([:;]) ", r"\1", style[0]), text)
    text = re.sub(r"(?<=data:image/png;base64,)[^\"]*", lambda image: _few_colours(image[0]), text)
    for stand_in, colour in PAGE_COLOURS.items():
        text = text.replace(stand_in, colour)
    opening, rest = text.split(">", 1)
    # the page has the width; the height follows from the view box
    return re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest


def _few_colours(image: str) -> str:
    """A PNG with a palette, both in base64: what is drawn in dots has the colours of one scale."""
    from PIL import Image

    file = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(image))) as drawn:
        drawn.convert("RGBA").quantize(128).save(file, format="png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _compact(path: str) -> str:
    """Shorten a path: straight lines by their steps, in tenths of a point, curves to a hundredth."""
    if set(re.findall("[A-Za-z]", path)) - set("MLz"):
        return re.sub(r"(\.\d\d)\d+", r"\1", path)
    parts: list[str] = []
    start = at = (0, 0)
    for letter, *numbers in re.findall(r"([MLz])(?: (\S+) (\S+))?", path):
        if letter == "z":
            parts.append("z")
            at = start
            continue
        x, y = (round(10 * float(number)) for number in numbers)
        if letter == "M":
            start = (x, y)
            parts.append(f"M{x / 10:g} {y / 10:g}")
        elif (x, y) != at or parts[-1].startswith("M"):  # a line without length is a dot
            parts.append(f"l{(x - at[0]) / 10:g} {(y - at[1]) / 10:g}")
        at = (x, y)
    return re.sub(r"(?<!\d)0\.", ".", "".join(parts)).replace(" -", "-")


def png(figure: Figure, *, dpi: int = 144) -> bytes:
    """A figure as PNG on white, for those too intricate for SVG."""
    return _draw(figure, lambda canvas, file: canvas.savefig(file, format="png", dpi=dpi, facecolor="white"), "")


def _draw(figure: Figure, save: Callable[[Any, io.BytesIO], object], salt: str) -> bytes:
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    file = io.BytesIO()
    settings: Any = {**STYLE, "svg.hashsalt": salt or None}
    with mpl.rc_context(settings):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(canvas)
        save(canvas, file)
    return file.getvalue()
