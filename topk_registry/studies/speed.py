"""Berrada Tables 3 and 4, Garcin Figure 3: how long a loss takes, against the number of classes and against k.

Every contestant takes its turn in every round, so that a disturbance hits all alike; figures are medians of the rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topk_registry.studies import registered
from topk_registry.studies.algorithms import ALGORITHM_2, AUTHORS, CONTESTANTS, DIVIDE, PLAIN, SUMMATION
from topk_registry.studies.study import Configuration, Figure, Findings, Median, Note, Options, Progress, Record, Table
from topk_registry.studies.timing import peers
from topk_registry.studies.timing.contest import CROSS_ENTROPY, OURS, Case, Contestant, Loss
from topk_registry.studies.timing.machine import busy, cpu_name
from topk_registry.studies.timing.measure import Row, measure
from topk_registry.studies.timing.peers import difftopk_neuralsort, pytopk_balanced
from topk_registry.studies.timing.rounds import Spread

TITLE = "Speed"
QUESTION = "What does a forward and a backward pass cost, against the number of classes and against k?"
REFERENCE = "Berrada, Zisserman, Kumar 2018, Tables 3 and 4; Garcin, Servajean, Joly, Salmon 2022, Figure 3"
RUNS = "speed"
VERSION = 1
ALONE = True

PYTOPK = "pytopk, balanced"
NEURALSORT = "difftopk, neuralsort"
CLASSES = (100, 1000, 10_000, 100_000)
KS = (1, 2, 5, 10, 20, 50)
AGAINST_CLASSES = (CROSS_ENTROPY, OURS, PLAIN, SUMMATION, DIVIDE, ALGORITHM_2, AUTHORS)
AGAINST_K = ("smooth_topk_svm", "noised_topk")
PEERS_AGAINST_K = (CROSS_ENTROPY, ALGORITHM_2, AUTHORS, PYTOPK, NEURALSORT)
PASSES = {"forward": "forward pass", "backward": "backward pass", "both": "both passes"}

OTHERS = {
    contestant.name: contestant
    for contestant in (
        peers.REFERENCE,
        Contestant(PYTOPK, pytopk_balanced),
        Contestant(NEURALSORT, difftopk_neuralsort),
    )
}


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    device = "cuda" if options.device.startswith("cuda") and torch.cuda.is_available() else "cpu"
    small = options.budget == "small"
    shared = {"tau": 1.0, "dtype": "float32", "device": device, "repeats": 15 if small else 50}
    names = list(options.losses or AGAINST_K)
    # on so many classes a published algorithm takes some gigabytes, and the summation ten seconds a pass
    sizes = [(n, 64 if small and n > 10_000 else 256, 10.0 if small and n <= 10_000 else 40.0) for n in CLASSES]
    return [
        *(
            {"sweep": "n", "n": n, "B": B, "k": 5, "limit": limit, "contestants": list(AGAINST_CLASSES), **shared}
            for n, B, limit in sizes
        ),
        *(
            {
                "sweep": "k",
                "n": 1000,
                "B": 256,
                "k": k,
                "limit": 10.0,
                "contestants": [*names, *PEERS_AGAINST_K],
                **shared,
            }
            for k in (KS if small else (*KS, 100))
        ),
    ]


def run(configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
    """Seconds of each contestant's forward and backward pass, their quartiles, and of the machine what matters."""
    c = configuration
    case = Case(c["B"], c["n"], c["k"], {"tau": c["tau"]}, device=c["device"], dtype=getattr(torch, c["dtype"]))
    chosen = [_contestant(name) for name in c["contestants"]]
    total, done = len(chosen) * (1 + c["repeats"]), 0

    def tick(name: str, count: int) -> None:
        nonlocal done
        done += count
        progress(min(done / total, 1.0), name)

    load = busy()
    rows, interrupted = measure(case, chosen, repeats=c["repeats"], limit=c["limit"], memory=False, tick=tick)
    if interrupted:
        raise KeyboardInterrupt
    return {
        "times": {row.contestant: _times(row) for row in rows},
        "threads": torch.get_num_threads(),
        "busy": load,
        "processor": torch.cuda.get_device_name(c["device"]) if c["device"] != "cpu" else cpu_name(),
    }


def _contestant(name: str) -> Contestant:
    """One of the table, or a registered loss by its name."""
    return CONTESTANTS.get(name) or OTHERS.get(name) or _registered(name)


def _registered(name: str) -> Contestant:
    """A registered loss, with k where it takes it."""

    def build(case: Case) -> Loss:
        loss = registered.build(name, class_counts=[100] * case.n, k=case.k, tau=case.options["tau"])
        return loss.to(case.device) if isinstance(loss, nn.Module) else loss

    return Contestant(name, build)


def _times(row: Row) -> dict[str, Any]:
    spreads: dict[str, Spread | None] = {"forward": row.forward, "backward": row.backward, "both": row.both}
    times = {name: asdict(spread) for name, spread in spreads.items() if spread}
    return {**times, "repeats": row.repeats, "problem": row.problem}


def report(records: Sequence[Record]) -> Findings:
    against_classes = _sweep(records, "n")
    against_k = _sweep(records, "k")
    return Findings(
        tables=(
            *(_table(against_classes, "n", which, table) for which, table in (("forward", 3), ("backward", 4))),
            _table(against_k, "k", "both", 0),
        ),
        figures=(_figure_classes(against_classes), _figure_k(against_k)),
        notes=(*_notes_classes(against_classes), *_notes_k(against_k)),
        protocol=_protocol(records),
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
    found = times.get(which)
    return Median(*(1000 * found[key] for key in ("median", "q1", "q3")), times["repeats"]) if found else None


def _names(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(name for times in sweep.values() for name in times))


def _table(sweep: Sweep, variable: str, which: str, number: int) -> Table:
    columns = tuple(f"{variable} = {value}" for value in sweep)
    rows = [
        (name, *(_median(times.get(name, {}), which) or times.get(name, {}).get("problem") for times in sweep.values()))
        for name in _names(sweep)
    ]
    where = f"Berrada Table {number}" if number else "Garcin Figure 3"
    return Table(
        f"Time of the {PASSES[which]} in ms ({where})",
        ("contestant", *columns),
        tuple(rows),
        note=f"Median and quartiles of the rounds. The paper's numbers are to be read in {where}.",
    )


def _figure_classes(sweep: Sweep) -> Figure:
    def draw(figure: Any) -> None:
        from topk_registry.studies.report import plots

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
        from topk_registry.studies.report import plots

        axes = figure.subplots()
        _lines(axes, sweep, "both")
        axes.set(xscale="log", yscale="log", xlabel="k", ylabel="ms", title="Forward and backward pass")
        axes.set_xticks(list(sweep), list(map(str, sweep)))
        axes.minorticks_off()
        plots.legend(figure, axes)

    return Figure("Time against k", "Medians with quartiles as bars; both axes are logarithmic.", draw, size=(8.0, 4.8))


def _lines(axes: Any, sweep: Sweep, which: str) -> None:
    from topk_registry.studies.report import plots

    series = {
        name: [(value, _median(times.get(name, {}), which)) for value, times in sweep.items()] for name in _names(sweep)
    }
    plots.lines(axes, series, band=False)


def _ratio(times: Mapping[str, Any], slower: str, faster: str, which: str) -> float | None:
    pair = [_median(times.get(name, {}), which) for name in (slower, faster)]
    return pair[0].middle / pair[1].middle if pair[0] and pair[1] else None


def _ratios(sweep: Sweep, slower: str, faster: str, which: str) -> dict[int, float]:
    found = {value: _ratio(times, slower, faster, which) for value, times in sweep.items()}
    return {value: ratio for value, ratio in found.items() if ratio is not None}


def _notes_classes(sweep: Sweep) -> list[Note]:
    notes = []
    for claim, slower, faster, which in (
        (
            "Divide and conquer is faster forwards than the summation.",
            SUMMATION,
            DIVIDE,
            "forward",
        ),
        (
            "The custom backward pass (Algorithm 2) is faster than automatic differentiation.",
            DIVIDE,
            ALGORITHM_2,
            "backward",
        ),
        ("Beyond the paper: ours is faster than Algorithm 2, both passes together.", ALGORITHM_2, OURS, "both"),
    ):
        ratios = _ratios(sweep, slower, faster, which)
        if ratios:
            every = [ratio > 1 for ratio in ratios.values()]
            verdict = "agrees" if all(every) else "open" if any(every) else "differs"
            factors = ", ".join(f"{ratio:.2g} at n = {n}" for n, ratio in ratios.items())
            notes.append(Note(claim, verdict, f"{slower} over {faster}, {PASSES[which]}: {factors}."))
    return notes


def _notes_k(sweep: Sweep) -> list[Note]:
    notes = []
    first, last = min(sweep, default=0), max(sweep, default=0)
    for claim, names, holds in (
        (
            "The time of the smooth loss grows with k, that of the noised loss hardly does.",
            (AUTHORS, PYTOPK),
            lambda smooth, noised: smooth > 2 * noised,
        ),
        (
            "Beyond the paper: neither of ours grows with k as the published smooth loss does.",
            (ALGORITHM_2, *AGAINST_K),
            lambda published, *mine: all(published > 2 * growth for growth in mine),
        ),
    ):
        growth = [_growth(sweep, name, first, last) for name in names]
        known = [value for value in growth if value is not None]
        if len(known) == len(names):
            factors = ", ".join(f"{name} {value:.2g}" for name, value in zip(names, known, strict=True))
            verdict = "agrees" if holds(*known) else "differs"
            notes.append(Note(claim, verdict, f"Time at k = {last} over that at k = {first}: {factors}."))
    return notes


def _growth(sweep: Sweep, name: str, first: int, last: int) -> float | None:
    low, high = (_median(sweep.get(k, {}).get(name, {}), "both") for k in (first, last))
    return high.middle / low.middle if low and high else None


def _protocol(records: Sequence[Record]) -> str:
    shapes = [record.configuration for record in records if record.configuration["sweep"] == "n"]
    batches = ", ".join(f"{c['B']} rows at n = {c['n']}" for c in shapes)
    machines = {f"{r.result['processor']}, {r.result['threads']} threads" for r in records}
    loads = sorted({r.result["busy"] for r in records if r.result["busy"]})
    disturbed = f" The machine was busy with other work: {'; '.join(loads)}." if loads else ""
    return (
        "Standard normal scores in single precision, tau = 1, forward and backward of the whole loss, the gradient "
        "allocated anew each time. Two passes to warm up, then rounds in which every contestant takes its turn, each "
        "round begun by another; one whose samples add up to the limit sits out. Against k: 256 rows of 1000 classes.\n\n"
        f"Against n: k = 5, {batches}.\n\nOn {'; '.join(sorted(machines))}.{disturbed}"
    )
