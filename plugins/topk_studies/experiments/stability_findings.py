"""Findings of the stability study: the papers' table, the gradient's error, and their claims."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from topk_studies.baselines.algorithms import ALGORITHM_2, AUTHORS, CONTESTANTS, LINEAR_SUMMATION, PLAIN
from topk_studies.engine.study import Figure, Findings, Note, Record, Table, Value
from topk_studies.timing.contest import OURS

PRECISIONS = {"float64": "double", "float32": "single", "float16": "half", "bfloat16": "bfloat16"}
TAUS = (1e1, 1e0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-8, 1e-16, 1e-36)
PAPER_TAUS = TAUS[:6]
SHAPE = {"B": 256, "n": 1000, "k": 5}
EXACT_ROWS = 8
FLOOR = 1e-18  # of the plot


def findings(records: Sequence[Record]) -> Findings:
    by_precision = _by_precision(records)
    shape = records[0].configuration if records else {**SHAPE, "exact_rows": EXACT_ROWS}
    return Findings(
        tables=(_finite_table(by_precision), *(_error_table(dtype, rows) for dtype, rows in by_precision.items())),
        figures=(_error_figure(by_precision),) if by_precision else (),
        notes=_notes(by_precision),
        protocol=(
            f"Standard normal scores, {shape['B']} rows of n = {shape['n']} classes, random labels, k = {shape['k']}, "
            "alpha = 1. A loss counts as finite if its mean over all rows is, a gradient if every entry is.\n\n"
            f"Errors are those of the first {shape['exact_rows']} rows against 60-digit arithmetic at "
            "the same scores, rounded to the precision that is tried: the largest error of an entry of the gradient, "
            "relative to the largest entry of its row."
        ),
        commands=(("With 32 rows against exact arithmetic:", "topk-registry study stability --budget paper"),),
    )


ByPrecision = dict[str, dict[str, dict[float, dict[str, Any]]]]  # precision, algorithm, tau


def _by_precision(records: Sequence[Record]) -> ByPrecision:
    by_precision: ByPrecision = {}
    for record in records:
        rows = by_precision.setdefault(record.configuration["dtype"], {})
        rows[record.configuration["algorithm"]] = {one["tau"]: one for one in record.result["results"]}
    order = [dtype for dtype in PRECISIONS if dtype in by_precision]
    return {
        dtype: {name: by_precision[dtype][name] for name in CONTESTANTS if name in by_precision[dtype]}
        for dtype in order
    }


def _finite_table(by_precision: ByPrecision) -> Table:
    """The paper's Table 5, and beyond."""
    rows = [
        (name, PRECISIONS[dtype], *(_state(taus.get(tau, {})) for tau in TAUS))
        for dtype, algorithms in by_precision.items()
        for name, taus in algorithms.items()
    ]
    return Table(
        "Is it finite? By temperature tau",
        ("algorithm", "precision", *(f"{tau:g}" for tau in TAUS)),
        tuple(rows),
        note="yes: loss and gradient; loss: the loss alone; no: neither; none: it does not run in this precision. The "
        "paper's Table 5 covers single and double precision down to tau = 1e-4, for the summation and for divide and "
        "conquer; its entries are to be read there.",
    )


def _state(one: dict[str, Any]) -> str:
    if "finite_loss" not in one:
        return "none" if one else ""
    return "yes" if one["finite_loss"] and one["finite_gradient"] else "loss" if one["finite_loss"] else "no"


def _error_table(dtype: str, algorithms: dict[str, dict[float, dict[str, Any]]]) -> Table:
    def cell(one: dict[str, Any]) -> Value:
        error = one.get("gradient_error")
        return f"{error:.1e}" if error is not None else _state(one) if one else None

    rows = [(f"{tau:g}", *(cell(taus.get(tau, {})) for taus in algorithms.values())) for tau in TAUS]
    note = f"One unit of rounding is {_unit(dtype):.1e}; none, no: as above."
    return Table(
        f"Error of the gradient in {PRECISIONS[dtype]} precision", ("tau", *algorithms), tuple(rows), note=note
    )


def _error_figure(by_precision: ByPrecision) -> Figure:
    def draw(figure: Any) -> None:
        from topk_studies.report import plots

        panels = figure.subplots(1, len(by_precision), sharey=True, squeeze=False)[0]
        for axes, (dtype, algorithms) in zip(panels, by_precision.items(), strict=True):
            series = {
                name: [(TAUS.index(tau), _within(one.get("gradient_error"))) for tau, one in taus.items()]
                for name, taus in algorithms.items()
            }
            plots.lines(axes, series)
            axes.axhline(_unit(dtype), color=plots.INK, linewidth=0.9, linestyle=":")
            axes.set(yscale="log", ylim=(FLOOR, 10), xlabel="temperature tau", title=PRECISIONS[dtype])
            axes.set_xticks(range(len(TAUS)), [f"{tau:g}" for tau in TAUS], rotation=60)
        panels[0].set_ylabel("error of the gradient")
        plots.legend(figure, panels[0])

    return Figure(
        "Error of the gradient against temperature",
        "Largest error of an entry relative to the largest entry of its row, against 60-digit arithmetic; temperatures "
        "fall to the right. A line has a gap where the gradient is not finite and leaves the plot where its error is "
        "above 10; an error of 0 lies on the axis. Dotted: one unit of rounding.",
        draw,
        size=(3.0 * max(len(by_precision), 2), 4.4),
    )


def _within(error: float | None) -> float | None:
    return None if error is None else max(error, FLOOR)


def _known(ones: Iterable[dict[str, Any]]) -> list[float]:
    return [one["gradient_error"] for one in ones if one.get("gradient_error") is not None]


def _unit(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps


def _notes(by_precision: ByPrecision) -> tuple[Note, ...]:
    single, double = by_precision.get("float32", {}), by_precision.get("float64", {})
    if not {LINEAR_SUMMATION, ALGORITHM_2, OURS, PLAIN} <= single.keys() & double.keys():
        return ()
    lost = [tau for tau in PAPER_TAUS if not single[LINEAR_SUMMATION][tau].get("finite_loss")]
    kept = all(rows[ALGORITHM_2][tau].get("finite_loss") for rows in (single, double) for tau in PAPER_TAUS)
    errors = {name: _known(single[name].values()) for name in (ALGORITHM_2, AUTHORS) if name in single}
    mine = {
        dtype: [one for name in (OURS, PLAIN) for one in rows.get(name, {}).values()]
        for dtype, rows in by_precision.items()
    }
    exact = {dtype: max(_known(ones), default=float("nan")) for dtype, ones in mine.items()}
    finite = all(_state(one) == "yes" for ones in mine.values() for one in ones)
    return (
        Note(
            "Summing in linear space overflows as the temperature falls; divide and conquer in log space does not.",
            "agrees" if lost and kept else "differs",
            f"In single precision the linear sum is lost at tau = {', '.join(f'{tau:g}' for tau in lost) or 'none'}; "
            f"divide and conquer in log space is {'finite' if kept else 'not finite'} at every tau of the paper, in "
            "single and in double precision.",
        ),
        Note(
            "The gradient of Algorithm 2 is an approximation, and the error it makes is large at low temperatures.",
            "agrees" if max(errors[ALGORITHM_2], default=0.0) > 1e-3 else "differs",
            "Largest error in single precision, where it is finite, relative to the largest entry: "
            + ", ".join(f"{max(known, default=float('nan')):.1e} of {name}" for name, known in errors.items())
            + ".",
            beyond=True,
        ),
        Note(
            "Ours is finite and exact to rounding at every temperature, in every precision.",
            "agrees" if finite and all(error < 20 * _unit(dtype) for dtype, error in exact.items()) else "differs",
            "Largest errors of the two ways to compute it: "
            + ", ".join(f"{error:.1e} in {PRECISIONS[dtype]}" for dtype, error in exact.items())
            + "; up to 20 units of rounding count as exact.",
            beyond=True,
        ),
    )
