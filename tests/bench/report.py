"""A table to read, and JSON to keep."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tests.bench.bandwidth import floor_seconds
from topk_studies.timing.contest import CROSS_ENTROPY, OURS
from topk_studies.timing.machine import busy, cpu_name
from topk_studies.timing.measure import Row
from topk_studies.timing.rounds import Spread

PACKAGES = ("topk-registry", "torch", "timm", "triton", "numba", "pytopk", "difftopk")
HEADER = ("contestant", "forward", "backward", "both, ms", "quartiles", "x CE", "x ours", "floor", "memory", "runs")


def table(rows: Sequence[Row], bandwidth: float) -> str:
    """All rows of one case; times in ms, ratios of medians, the time that moving logits and gradient takes as a share
    of the whole, peak memory as a multiple of the logits."""
    case = rows[0].case
    medians = {row.contestant: row.both.median for row in rows if row.both}
    logit_bytes = case.B * case.n * case.dtype.itemsize
    floor = floor_seconds(case, bandwidth)
    lines = [HEADER, *(_cells(row, medians, floor, logit_bytes) for row in rows)]
    body = aligned(lines)
    problems = [f"{row.contestant}: {row.problem}" for row in rows if row.problem]
    moved = f"floor: logits and gradient moved once at {bandwidth / 1e9:.3g} GB/s in {_ms(floor)} ms"
    return "\n".join([case.title, *body, moved, *problems])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells under one another: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]


def environment(device: str) -> dict[str, object]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "busy": busy(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "packages": {name: _version(name) for name in PACKAGES},
    }


def record(row: Row, bandwidth: float) -> dict[str, object]:
    """One row as JSON: seconds and bytes, and bytes a second."""
    case = row.case
    shape = {"B": case.B, "n": case.n, "k": case.k, **case.options, "dtype": str(case.dtype).removeprefix("torch.")}
    moved = {"bandwidth": bandwidth, "floor": floor_seconds(case, bandwidth)}
    return {**shape, **moved, **{name: value for name, value in asdict(row).items() if name != "case"}}


def dumps(report: Mapping[str, Any]) -> str:
    """The report as JSON, a line for each of its parts and for each result, with numbers to seven digits."""
    head = [f"{json.dumps(name)}: {json.dumps(_rounded(part))}" for name, part in report.items() if name != "results"]
    rows = ",\n  ".join(json.dumps(_rounded(row)) for row in report["results"])
    return "{\n " + ",\n ".join([*head, f'"results": [\n  {rows}\n ]']) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _cells(row: Row, medians: dict[str, float], floor: float, logit_bytes: int) -> tuple[str, ...]:
    memory = "" if row.peak_bytes is None else f"{row.peak_bytes / logit_bytes:.1f}"
    if not row.both:
        return (row.contestant, "-", "-", "-", "", "", "", "", memory, "0")
    ratios = [f"{row.both.median / medians[name]:.2f}" if name in medians else "" for name in (CROSS_ENTROPY, OURS)]
    times = [_ms(spread.median) for spread in (row.forward, row.backward, row.both) if spread]
    return (
        row.contestant,
        *times,
        _quartiles(row.both),
        *ratios,
        f"{floor / row.both.median:.1%}",
        memory,
        str(row.repeats),
    )


def _quartiles(spread: Spread) -> str:
    return f"{_ms(spread.q1)}-{_ms(spread.q3)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
