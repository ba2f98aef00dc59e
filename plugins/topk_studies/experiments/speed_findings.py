"""Findings of the speed study: the papers' tables and figure, and their claims."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.baselines.algorithms import ALGORITHM_2, AUTHORS, DIVIDE, PYTOPK, SUMMATION
from topk_studies.engine.study import Figure, Findings, Median, Note, Record, Table
from topk_studies.timing.contest import OURS

AGAINST_K = ("smooth_topk_svm", "noised_topk")
CLOSE = 1.05  # a smaller ratio of two times is no difference that matters
PASSES = {"forward": "forward pass", "backward": "backward pass", "both": "two passes together"}


def findings(records: Sequence[Record]) -> Findings:
    against_classes = _sweep(records, "n")
    against_k = _sweep(records, "k")
    tables: list[Table] = []
    figures: list[Figure] = []
    if against_classes:
        tables += [_table(against_classes, "n", "forward", "Berrada Table 3")]
        tables += [_table(against_classes, "n", "backward", "Berrada Table 4")]
        figures.append(_figure_classes(against_classes))
    if against_k:
        tables.append(_table(against_k, "k", "both", "Garcin Figure 3"))
        figures.append(_figure_k(against_k))
    return Findings(
        tables=tuple(tables),
        figures=tuple(figures),
        notes=(*_notes_classes(against_classes), *_notes_k(against_k)),
        protocol=_protocol(records),
        commands=(
            ("On a GPU, with 256 rows throughout and k up to 100:", "topk-registry study speed --budget paper"),
            ("Your own loss against k:", "topk-registry study speed --losses YOUR_LOSS smooth_topk_svm noised_topk"),
        ),
    )


Sweep = dict[int, dict[str, dict[str, Any]]]  # n or k -> contestant -> its times


def _sweep(records: Sequence[Record], name: str) -> Sweep:
    chosen = [record for record in records if record.configuration["sweep"] == name]
    return {
        record.configuration[name]: record.result["times"]
        for record in sorted(chosen, key=lambda record: record.configuration[name])
    }


def _median(times: Mapping[str, Any], which: str) -> Median | None:
    """Milliseconds."""
    quartiles = times.get(which)
    if not quartiles:
        return None
    return Median(1000 * quartiles["median"], 1000 * quartiles["q1"], 1000 * quartiles["q3"], times["repeats"])


def _names(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(name for times in sweep.values() for name in times))


def _table(sweep: Sweep, variable: str, which: str, where: str) -> Table:
    columns = tuple(f"{variable} = {value}" for value in sweep)
    rows = [
        (name, *(_median(times.get(name, {}), which) or times.get(name, {}).get("problem") for times in sweep.values()))
        for name in _names(sweep)
    ]
    return Table(
        f"Time of the {PASSES[which]} in ms ({where})",
        ("contestant", *columns),
        tuple(rows),
        note=f"Median and quartiles of the rounds. The paper's numbers are to be read in {where}.",
    )


def _figure_classes(sweep: Sweep) -> Figure:
    def draw(figure: Any) -> None:
        from topk_studies.report import plots

        panels = figure.subplots(1, 2, sharey=True)
        for axes, which in zip(panels, ("forward", "backward"), strict=True):
            _lines(axes, sweep, which)
            axes.set(xscale="log", yscale="log", xlabel="classes n", title=PASSES[which].capitalize())
        panels[0].set_ylabel("ms")
        plots.legend(figure, panels[0])

    return Figure(
        "Time against the number of classes",
        "Medians with quartiles as bars; both axes are logarithmic.",
        draw,
        size=(9.0, 4.8),
    )


def _figure_k(sweep: Sweep) -> Figure:
    def draw(figure: Any) -> None:
        from topk_studies.report import plots

        axes = figure.subplots()
        _lines(axes, sweep, "both")
        axes.set(xscale="log", yscale="log", xlabel="k", ylabel="ms", title="Forward and backward pass")
        axes.set_xticks(list(sweep), list(map(str, sweep)))
        axes.minorticks_off()
        plots.legend(figure, axes)

    return Figure("Time against k", "Medians with quartiles as bars; both axes are logarithmic.", draw, size=(8.0, 4.8))


def _lines(axes: Any, sweep: Sweep, which: str) -> None:
    from topk_studies.report import plots

    series = {
        name: [(value, _median(times.get(name, {}), which)) for value, times in sweep.items()] for name in _names(sweep)
    }
    plots.lines(axes, series, band=False)


def _notes_classes(sweep: Sweep) -> list[Note]:
    claims = (
        ("Divide and conquer is faster forwards than the summation.", SUMMATION, DIVIDE, "forward"),
        ("The custom backward pass is faster than automatic differentiation.", DIVIDE, ALGORITHM_2, "backward"),
        ("Ours is faster than Algorithm 2.", ALGORITHM_2, OURS, "both"),
    )
    return [note for claim in claims for note in _faster(sweep, *claim)]


def _faster(sweep: Sweep, claim: str, slower: str, faster: str, which: str) -> list[Note]:
    """Judge the claim that ``faster`` is faster at each n: a note for each verdict, of the n that it is true of."""
    factors: dict[str, list[str]] = {}
    for n, times in sweep.items():
        a, b = _median(times.get(slower, {}), which), _median(times.get(faster, {}), which)
        if a and b:
            factors.setdefault(_verdict(a, b), []).append(f"{a.middle / b.middle:.2g} at n = {n}")
    of = f"Time of {slower} over that of {faster}, {PASSES[which]}"
    return [
        Note(claim, verdict, f"{of}: {', '.join(ratios)}.", beyond=faster == OURS)
        for verdict, ratios in factors.items()
    ]


def _verdict(slower: Median, faster: Median) -> str:
    """Of two times: the same where the medians are close, else decided where the quartiles are apart."""
    if max(slower.middle, faster.middle) < CLOSE * min(slower.middle, faster.middle):
        return "same"
    if faster.high < slower.low:
        return "agrees"
    return "differs" if slower.high < faster.low else "open"


def _notes_k(sweep: Sweep) -> list[Note]:
    published = "The time of the smooth loss grows with k, that of the noised loss hardly does."
    here = "Neither of our two losses grows with k as the published smooth loss does."
    return [
        *_grows(sweep, published, AUTHORS, (PYTOPK,), beyond=False),
        *_grows(sweep, here, ALGORITHM_2, AGAINST_K, beyond=True),
    ]


def _grows(sweep: Sweep, claim: str, grows: str, stay: Sequence[str], *, beyond: bool) -> list[Note]:
    """Judge the claim that ``grows`` grows most: twice as much as any other, from the least k to the largest of all."""
    names = (grows, *stay)
    reached = [k for k, times in sweep.items() if all(_median(times.get(name, {}), "both") for name in names)]
    if len(reached) < 2:
        return []
    first, last = min(reached), max(reached)
    growth = {name: sweep[last][name]["both"]["median"] / sweep[first][name]["both"]["median"] for name in names}
    verdict = "agrees" if all(growth[grows] > 2 * growth[name] for name in stay) else "differs"
    factors = ", ".join(f"{name} {factor:.2g}" for name, factor in growth.items())
    return [Note(claim, verdict, f"Time at k = {last} over that at k = {first}: {factors}.", beyond)]


def _protocol(records: Sequence[Record]) -> str:
    shapes = [record.configuration for record in records if record.configuration["sweep"] == "n"]
    batches = ", ".join(f"{c['B']} rows at n = {c['n']}" for c in shapes)
    machines = {f"{r.result['processor']}, {r.result['threads']} threads" for r in records}
    loads = [r.result["busy"] for r in records if r.result["busy"]]
    disturbed = f" {len(loads)} of {len(records)} runs began while other work kept the machine busy." if loads else ""
    return (
        "Standard normal scores in single precision, tau = 1, forward and backward of the whole loss, the gradient "
        "allocated anew each time. Two passes to warm up, then rounds in which every contestant takes its turn, each "
        "round begun by another; one whose samples add up to the limit sits out.\n\nAgainst k: 256 rows of 1000 "
        f"classes. Against n: k = 5, {batches}.\n\nOn {'; '.join(sorted(machines))}.{disturbed}"
    )
