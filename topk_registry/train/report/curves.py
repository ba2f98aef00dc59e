"""A picture of a run's curves: one SVG file, written by hand, with no plotting library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT, GAP = 460, 300, 30
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 44, 44
COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#64605a")


@dataclass
class Panel:
    """A set of named lines over the same axes."""

    title: str
    lines: dict[str, list[Point]]
    unit: str = ""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The panels side by side, as the text of an SVG file."""
    width = len(panels) * (WIDTH + GAP) + GAP
    body = "\n".join(
        f'<g transform="translate({GAP + i * (WIDTH + GAP)},{GAP})">{_panel(panel)}</g>'
        for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + GAP + 14}" '
        f'viewBox="0 0 {width} {HEIGHT + GAP + 14}" font-family="sans-serif" font-size="12" fill="#37352f">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="{GAP}" y="24" font-size="15" font-weight="600">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel) -> str:
    lines = {name: [(x, y) for x, y in line if math.isfinite(y)] for name, line in panel.lines.items()}
    lines = {name: line for name, line in lines.items() if line}
    points = [point for line in lines.values() for point in line] or [(0.0, 0.0)]
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points), whole=True)
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (point[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(x, 1), round(y, 1)

    parts = [f'<text x="{LEFT}" y="{TOP - 22}" font-weight="600">{escape(panel.title)}</text>']
    for y in y_ticks:
        height = place((x_ticks[0], y))[1]
        parts.append(f'<path d="M{LEFT} {height}H{WIDTH - RIGHT}" stroke="#e3e2e0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4}" text-anchor="end">{_number(y)}{panel.unit}</text>')
    for x in x_ticks:
        across = place((x, y_ticks[0]))[0]
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(x)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">epoch</text>')
    across = LEFT
    for i, (name, line) in enumerate(lines.items()):
        parts.append(_line(name, [place(point) for point in line], COLOURS[i % len(COLOURS)], across, dashed=i > 1))
        across += 34 + 7 * len(name)
    return "".join(parts)


def _line(name: str, places: list[tuple[float, float]], colour: str, across: int, *, dashed: bool) -> str:
    path = " ".join(f"{x},{y}" for x, y in places)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.2" fill="{colour}"/>' for x, y in places[-60:])
    dash = ' stroke-dasharray="5 3"' if dashed else ""  # so that a line on top of another hides nothing
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>{dots}'
        f'<rect x="{across}" y="{TOP - 13}" width="12" height="3" fill="{colour}"/>'
        f'<text x="{across + 17}" y="{TOP - 7}">{escape(name)}</text>'
    )


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four to eight round numbers that span the range."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= 6)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:.6g}"
