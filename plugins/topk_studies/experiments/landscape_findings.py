"""Findings on the landscapes: level sets, the shape of each loss in numbers, and the papers' claims."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from topk_studies.engine.study import Figure, Findings, Note, Record, Table

NOISED = "noised_topk"
HINGE = "topk_hinge_calibrated"  # the noised loss at eps = 0
EPSILONS = (0.1, 0.3, 1.0, 3.0)
DRAWS = (1, 5, 50)
SHAPE = {"k": 2, "scale": 2.0, "label": 0, "divisions": 30, "class_counts": [100, 30, 10]}
REPLICATIONS = 100
LEVELS = 12
PANELS = 4  # in a row of the figure


def grid(divisions: int) -> list[tuple[float, float, float]]:
    """Points of the 2-simplex: all (a, b, c) / divisions with whole a, b, c that sum to it."""
    return [
        (a / divisions, b / divisions, (divisions - a - b) / divisions)
        for a in range(divisions + 1)
        for b in range(divisions + 1 - a)
    ]


def at(values: Sequence[float], divisions: int, point: Sequence[float]) -> float:
    """The value at the grid's point nearest to this one."""
    return min(zip(grid(divisions), values, strict=True), key=lambda one: math.dist(one[0], point))[1]


def findings(records: Sequence[Record]) -> Findings:
    drawn = [record for record in records if "values" in record.result]
    plain = {record.configuration["loss"]: record for record in drawn if not record.configuration["options"]}
    noised = {_noise(record): record for record in drawn if record.configuration["options"]}
    refused = {r.configuration["loss"]: r.result["problem"] for r in records if "problem" in r.result}
    shape = records[0].configuration if records else SHAPE
    return Findings(
        tables=(
            *([_table(plain)] if plain else []),
            *([_noise_table(noised, plain)] if noised else []),
            *([_refused_table(refused)] if refused else []),
        ),
        figures=(*([_figure(plain)] if plain else []), *([_noise_figure(noised)] if noised else [])),
        notes=_notes(plain, noised),
        protocol=(
            f"Scores s = {shape['scale']:g} p, p on the 2-simplex, the label fixed, k = {shape['k']} for every loss "
            "that has a k, all other options at their defaults, and class counts of "
            f"{', '.join(map(str, shape['class_counts']))} for the losses that ask for them.\n\n"
            f"A random loss is the mean over {REPLICATIONS} draws, the same ones at every point. Where B is varied it "
            "is one evaluation, with draws of its own at every point, as a training step sees it."
        ),
        commands=(
            ("Your own loss beside others:", "topk-registry study landscape --losses YOUR_LOSS ce smooth_topk_svm"),
            ("On a grid twice as fine:", "topk-registry study landscape --budget paper"),
        ),
    )


Noise = tuple[float, int, int]  # eps, B, replications


def _noise(record: Record) -> Noise:
    c = record.configuration
    return c["options"]["epsilon"], c["options"]["num_samples"], c["replications"]


def _table(plain: dict[str, Record]) -> Table:
    return Table(
        "Shape of each loss on the simplex",
        ("loss", "least", "greatest", "at the label", "in the middle", "between the others", "flat, %", "convex"),
        tuple((name, *_shape(record)) for name, record in plain.items()),
        note="The label, the middle and the middle between the other two are points of the simplex; flat: the share of "
        "the grid whose loss is the least there is; convex: no midpoint of neighbours lies above their mean.",
    )


def _shape(record: Record) -> tuple[Any, ...]:
    values, divisions = record.result["values"], record.configuration["divisions"]
    least, greatest = min(values), max(values)
    flat = sum(value <= least + 1e-6 for value in values) / len(values)
    corner = tuple(float(i == record.configuration["label"]) for i in range(3))
    across = tuple(0.0 if c else 0.5 for c in corner)
    places = [at(values, divisions, point) for point in (corner, (1 / 3, 1 / 3, 1 / 3), across)]
    return least, greatest, *places, round(100 * flat), "yes" if is_convex(values, divisions) else "no"


def _refused_table(refused: dict[str, str]) -> Table:
    return Table("Losses that do not take three scores and a label", ("loss", "why"), tuple(refused.items()))


def is_convex(values: Sequence[float], divisions: int) -> bool:
    """Whether every value is at most the mean of its neighbours, in each of the grid's three directions."""
    table = {
        (round(divisions * a), round(divisions * b)): v for (a, b, _), v in zip(grid(divisions), values, strict=True)
    }
    rounding = 4e-6  # of values kept to six digits
    return all(
        2 * value <= table[a + da, b + db] + table[a - da, b - db] + rounding
        for (a, b), value in table.items()
        for da, db in ((1, 0), (0, 1), (1, -1))
        if (a + da, b + db) in table and (a - da, b - db) in table
    )


def rms(left: Sequence[float], right: Sequence[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(left, right, strict=True)) / len(left))


def _spreads(noised: dict[Noise, Record]) -> dict[float, dict[int, float]]:
    """By eps and B: how far one draw of the loss is from the mean of many, root mean square over the grid."""
    means = {epsilon: r.result["values"] for (epsilon, _, replications), r in noised.items() if replications > 1}
    spreads: dict[float, dict[int, float]] = {}
    for (epsilon, B, replications), record in noised.items():
        if replications == 1 and epsilon in means:
            spreads.setdefault(epsilon, {})[B] = rms(record.result["values"], means[epsilon])
    return spreads


def _distances(noised: dict[Noise, Record], plain: dict[str, Record]) -> dict[float, float]:
    """By eps: how far the mean is from the hinge that it smooths."""
    if HINGE not in plain:
        return {}
    hinge = plain[HINGE].result["values"]
    return {
        epsilon: rms(record.result["values"], hinge)
        for (epsilon, _, replications), record in noised.items()
        if replications > 1 and len(record.result["values"]) == len(hinge)
    }


def _noise_table(noised: dict[Noise, Record], plain: dict[str, Record]) -> Table:
    spreads, distances = _spreads(noised), _distances(noised, plain)
    rows = [(f"{e:g}", *(by_draws.get(B) for B in DRAWS), distances.get(e)) for e, by_draws in spreads.items()]
    return Table(
        "What eps and B change",
        ("eps", *(f"spread, B = {B}" for B in DRAWS), "from the hinge"),
        tuple(rows),
        note=f"Spread: of one evaluation around the mean of {REPLICATIONS}, root mean square over the grid. From the "
        "hinge: of that mean from the calibrated hinge, which is the loss at eps = 0.",
    )


def _figure(plain: dict[str, Record]) -> Figure:
    rows = -(-len(plain) // PANELS)

    def draw(figure: Any) -> None:
        panels = figure.subplots(rows, PANELS, squeeze=False)
        triangles(figure, panels.flat, list(plain.items()))

    return Figure(
        "Level sets of every loss",
        "Dark is low and bright is high; each panel is scaled to its own range, which stands below it. "
        "The label's corner is marked by a circle. Lines are level sets: where they are dense the loss is steep.",
        draw,
        size=(10.0, 2.25 * rows),
        alt=f"{len(plain)} triangles, one a loss, with the level sets of the loss over three scores: "
        f"{', '.join(plain)}. Their shapes are put in numbers by the table above.",
    )


def _noise_figure(noised: dict[Noise, Record]) -> Figure:
    epsilons = sorted({epsilon for epsilon, _, _ in noised})
    kinds = [*((B, 1, f"B = {B}") for B in DRAWS), (DRAWS[-1], REPLICATIONS, "mean of many")]

    def draw(figure: Any) -> None:
        panels = figure.subplots(len(epsilons), len(kinds), squeeze=False)
        named = [
            (f"eps = {epsilon:g}, {name}", noised.get((epsilon, B, replications)))
            for epsilon in epsilons
            for B, replications, name in kinds
        ]
        triangles(figure, panels.flat, named)

    return Figure(
        "What eps and B do to the noised loss",
        "As above. Each row has an eps of its own; from left to right one evaluation with more and more draws B, as a "
        "training step sees it, and last the mean of many, the function that they estimate.",
        draw,
        size=(9.0, 2.35 * len(epsilons)),
        alt="A grid of triangles with level sets: single evaluations are rough at B = 1 and smoother at larger B; the "
        "mean is smooth, the more so the larger eps.",
    )


def triangles(figure: Any, panels: Iterable[Any], named: Sequence[tuple[str, Record | None]]) -> None:
    """Draw a landscape into each panel, named; None leaves its panel empty."""
    figure.set_layout_engine(None)  # constrained layout finds no room for axes of equal aspect without ticks
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.04, top=0.97, wspace=0.12, hspace=0.3)
    panels = list(panels)
    for axes, (name, record) in zip(panels, named, strict=False):
        axes.set_title(name, fontsize=9, loc="center")
        if record is not None:
            _triangle(axes, record)
    for axes in panels:
        axes.set(aspect="equal", xlim=(-0.06, 1.06), ylim=(-0.06, 0.92))
        axes.axis("off")


def _triangle(axes: Any, record: Record) -> None:
    from matplotlib.tri import Triangulation

    from topk_studies.report import plots

    values, label = record.result["values"], record.configuration["label"]
    corners = [(0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(0.75))]
    order = [label, *(c for c in range(3) if c != label)]
    points = grid(record.configuration["divisions"])
    x, y = ([sum(p[c] * corners[i][axis] for i, c in enumerate(order)) for p in points] for axis in (0, 1))
    mesh = Triangulation(x, y)
    low, high = min(values), max(values)
    if high == low or record.configuration["replications"] == 1:  # draws at every point: level sets would be a thicket
        axes.tripcolor(mesh, values, cmap="cividis", shading="gouraud", rasterized=True)
    else:
        levels = [low + (high - low) * i / LEVELS for i in range(LEVELS + 1)]
        levels[-1] += 1e-6 * (high - low)  # a plateau at the top is filled, too
        filled = axes.tricontourf(mesh, values, levels=levels, cmap="cividis")
        filled.set_edgecolor("face")
        axes.tricontour(mesh, values, levels=levels[1:-1], colors="white", linewidths=0.5)
    axes.plot(*corners[0], marker="o", markersize=7, markerfacecolor="none", markeredgecolor=plots.INK, clip_on=False)
    axes.text(0.5, -0.04, f"{low:.3g} to {high:.3g}", ha="center", va="top", fontsize=8)


def _notes(plain: dict[str, Record], noised: dict[Noise, Record]) -> tuple[Note, ...]:
    notes = []
    distances = _distances(noised, plain)
    if len(distances) > 1:
        ordered = [distances[epsilon] for epsilon in sorted(distances)]
        notes.append(
            Note(
                "The noised loss tends to the calibrated hinge as eps falls.",
                "agrees" if ordered == sorted(ordered) and ordered[0] < 0.1 * ordered[-1] else "differs",
                f"Distance: {', '.join(f'{distances[e]:.2g} at eps = {e:g}' for e in sorted(distances))}.",
            )
        )
    few, many = DRAWS[0], DRAWS[-1]
    spreads = {e: by_draws[few] / by_draws[many] for e, by_draws in _spreads(noised).items() if by_draws.get(many)}
    if spreads:
        wanted = math.sqrt(many / few)
        notes.append(
            Note(
                "More draws B make it smoother, at the rate of a mean: by the root of their number.",
                "agrees" if all(0.7 * wanted < factor < 1.4 * wanted for factor in spreads.values()) else "differs",
                f"From B = {few} to {many} the spread falls by "
                f"{', '.join(f'{factor:.2g} at eps = {e:g}' for e, factor in spreads.items())}; the root of "
                f"{many // few} is {wanted:.2g}.",
            )
        )
    vanished = [e for (e, _, replications), r in noised.items() if replications > 1 and max(r.result["values"]) == 0]
    if vanished:
        notes.append(
            Note(
                "With too large an eps the loss vanishes, and its gradient with it.",
                "agrees",
                f"It is 0 on the whole simplex at eps = {', '.join(f'{e:g}' for e in vanished)}: with k = 2 of three "
                "classes the noised threshold is the least of three noisy scores, which lies below every score less 1.",
                beyond=True,
            )
        )
    if HINGE in plain:
        convex = is_convex(plain[HINGE].result["values"], plain[HINGE].configuration["divisions"])
        notes.append(
            Note(
                "The calibrated hinge is not convex, which is the price of its calibration.",
                "differs" if convex else "agrees",
                f"On the grid a midpoint {'never' if convex else 'somewhere'} lies above the mean of its neighbours.",
            )
        )
    return tuple(notes)
