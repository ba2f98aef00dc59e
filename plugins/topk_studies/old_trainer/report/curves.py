"""A picture of a run's curves, drawn by matplotlib where it is installed."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

Point = tuple[float, float]

MISSING = "curves.svg is drawn where matplotlib is installed: pip install 'topk-registry[curves]'"


@dataclass
class Panel:
    """Named lines over the same axes."""

    title: str
    lines: dict[str, list[Point]]
    unit: str = ""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The panels side by side, as the text of an SVG file; each line is a group with its name as ``id``."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # text stays text, and the same curves give the same file
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "topk-registry"}):
        figure = Figure(figsize=(4.8 * len(panels), 3.6), layout="constrained")
        figure.suptitle(title, fontweight="bold")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.set(title=panel.title, xlabel="epoch", ylabel=panel.unit)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
            lines = {name: [point for point in line if math.isfinite(point[1])] for name, line in panel.lines.items()}
            for i, (name, line) in enumerate(lines.items()):
                # dashed, so that a line on top of another hides nothing
                axes.plot(*zip(*line, strict=True), ".--" if i > 1 else ".-", label=name, gid=name) if line else None
            if any(lines.values()):
                axes.legend()
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()
