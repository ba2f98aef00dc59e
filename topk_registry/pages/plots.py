"""Small SVG plots for pages that need no plotting library: bars, lines over shared axes, and intervals."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 16, 44
COLOURS = ("#23856e", "#c06a1c", "#5577c4", "#a162ba")  # of the middle luminance: they stand out on white and on black


def bars(values: Sequence[tuple[str, float]], *, label: str, of: str, level: float | None = None) -> str:
    """Named bars from 0 up.

    Args:
        values: name and height of each.
        label: what the plot shows, for readers who do not see it.
        of: of the horizontal axis.
        level: a dashed line at this height.
    """
    top = max([value for _, value in values] + [level or 0.0, 1e-9])
    width = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    parts = []
    for i, (name, value) in enumerate(values):
        x, y = LEFT + i * width, _y(value, 0.0, top)
        parts.append(
            f'<rect x="{x + 0.1 * width:.1f}" y="{y:.1f}" width="{0.8 * width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
            f'fill="{COLOURS[0]}"><title>{escape(name)}: {value:.4g}</title></rect>'
        )
        if len(values) <= 24 or i % (len(values) // 12) == 0:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>'
            )
    return _frame("".join(parts), label, of, 0.0, top, level)


def lines(
    named: Mapping[str, Sequence[tuple[float, float]]], *, label: str, of: str, level: float | None = None
) -> str:
    """Lines through points, one colour a name.

    Args:
        named: the points of each line.
        label, of, level: as of :func:`bars`.
    """
    points = [point for line in named.values() for point in line] or [(0.0, 0.0)]
    heights = [y for _, y in points] + ([] if level is None else [level])
    low, high = min(heights), max(heights)
    high = high if high > low else low + 1.0
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    span = (right - left) or 1.0
    parts = []
    for i, (name, line) in enumerate(named.items()):
        path = " ".join(
            f"{LEFT + (WIDTH - LEFT - RIGHT) * (x - left) / span:.1f},{_y(y, low, high):.1f}" for x, y in line
        )
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(f'<text x="{LEFT + 8 + 150 * i}" y="{TOP - 4}" fill="{colour}">{escape(name)}</text>')
    for share in (0.0, 0.5, 1.0):
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{left + span * share:.6g}</text>'
        )
    return _frame("".join(parts), label, of, low, high, level)


def intervals(
    rows: Sequence[tuple[str, float, float, float]], *, label: str, of: str, band: tuple[float, float] | None = None
) -> str:
    """Values with intervals, a row each, beside a line at zero.

    Args:
        rows: name, low end, value and high end of each.
        label: what the plot shows, for readers who do not see it.
        of: of the horizontal axis.
        band: a shaded range.
    """
    left, height = 190, 26
    ends = [0.0, *(band or ()), *(end for _, low, _, high in rows for end in (low, high) if math.isfinite(end))]
    low, high = min(ends), max(ends)
    room = 0.05 * ((high - low) or 1.0)
    low, high = low - room, high + room
    bottom = TOP + height * len(rows)

    def x(value: float) -> float:
        return left + (WIDTH - left - RIGHT) * (min(max(value, low), high) - low) / (high - low)

    parts = []
    if band is not None:
        parts.append(
            f'<rect x="{x(band[0]):.1f}" y="{TOP}" width="{x(band[1]) - x(band[0]):.1f}" height="{bottom - TOP}" '
            f'fill="currentColor" opacity=".08"/>'
        )
    parts.append(f'<path d="M{x(0):.1f} {TOP}V{bottom}" stroke="currentColor" opacity=".5"/>')
    for i, (name, start, value, end) in enumerate(rows):
        y = TOP + height * (i + 0.5)
        told = f"{name}: {value:.4g} ({start:.4g} to {end:.4g})"
        parts.append(
            f'<g><title>{escape(told)}</title><text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}'
            f'</text><path d="M{x(start):.1f} {y:.1f}H{x(end):.1f}" stroke="{COLOURS[2]}" stroke-width="3" '
            f'stroke-linecap="round"/><circle cx="{x(value):.1f}" cy="{y:.1f}" r="4.5" fill="{COLOURS[2]}"/></g>'
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + (high - low) * share
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value:.3g}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" aria-label="{escape(label)}" font-size="11" '
        f'fill="currentColor">{"".join(parts)}<text x="{(left + WIDTH - RIGHT) / 2}" y="{bottom + BOTTOM - 6}" '
        f'text-anchor="middle">{escape(of)}</text></svg>'
    )


def _y(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if math.isfinite(value) else 0.0
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, max(0.0, share))


def _frame(content: str, label: str, of: str, low: float, high: float, level: float | None) -> str:
    ticks = "".join(
        f'<path d="M{LEFT} {_y(t, low, high):.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".15"/>'
        f'<text x="{LEFT - 8}" y="{_y(t, low, high) + 4:.1f}" text-anchor="end">{t:.3g}</text>'
        for t in (low + (high - low) * i / 4 for i in range(5))
    )
    line = (
        ""
        if level is None
        else f'<path d="M{LEFT} {_y(level, low, high):.1f}H{WIDTH - RIGHT}" stroke="#a4262c" stroke-dasharray="5 4">'
        f"<title>{level:.4g}</title></path>"
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" font-size="11" '
        f'fill="currentColor">'
        f'{ticks}{content}{line}<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(of)}</text></svg>"
    )
