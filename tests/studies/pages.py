"""A report with everything in it: intervals and single runs, a paper's column, long words, hostile names, failures."""

import math
from typing import Any

from topk_studies.engine.study import Estimate, Figure, Findings, Median, Note, Record, Section, Table
from topk_studies.report import plots

HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\"> & \"quotes\" 'too'"
NUMBERS = Table(
    "Top-5 accuracy",
    ("label noise", "ce", "smooth_topk_svm", "ce, paper", HOSTILE),
    (
        ("0 %", Estimate(91.25, 0.31, 3), Estimate(91.85, 0.42, 3), 76.68, 3),
        ("60 %", Estimate(87.35, 0.22, 3), Estimate(90.80, 0.25, 3), None, 12_345),
        (HOSTILE, None, Estimate(12.125, math.nan, 1), 61.5, 1e-9),
    ),
    note="Percent on the test split.",
    paper=("ce, paper",),
    compared=("ce", "smooth_topk_svm"),
    along="row",
)
WIDE = Table(
    "Times",
    ("contestant", *(f"n = {10**i}" for i in range(2, 9))),
    (("ours", *(Median(10.0**i, 0.9 * 10**i, 1.1 * 10**i, 15) for i in range(7))),),
)
SHOWN = (
    *("91.25 ± 0.31", "91.85 ± 0.42", "87.35 ± 0.22", "90.80 ± 0.25", "76.68", "61.5", "12.12", "1e-09"),
    *("12\N{NARROW NO-BREAK SPACE}345", "10 (9 to 11)", "1000000 (900000 to 1100000)"),
)


def draw(canvas: Any) -> None:
    axes = canvas.subplots()
    plots.lines(axes, {"ce": [(0, Estimate(90.0, 1.0, 3)), (1, Estimate(80.0, 2.0, 3))], HOSTILE: [(0, 1.0), (1, 2.0)]})
    axes.set_xlabel(HOSTILE)
    plots.legend(canvas, axes)


def noise(canvas: Any) -> None:
    """Too many points for SVG."""
    canvas.subplots().scatter([i % 101 for i in range(12_000)], [i * 7919 % 1000 for i in range(12_000)])


def record(**changes: Any) -> Record:
    given = {"configuration": {"loss": "ce", "seed": 0}, "result": {"top5": 91.25}, "seconds": 40.0, **changes}
    versions = {"topk-registry": "0.1.0", "torch": "2.15.0", "machine": "x86_64, 2 cores"}
    return Record("train", 1, when="2026-01-02T03:04:05+00:00", versions=versions, **given)


def sections() -> list[Section]:
    findings = Findings(
        tables=(NUMBERS, WIDE),
        figures=(Figure(HOSTILE, "A caption.", draw, alt="Two lines."), Figure("Noise", "Too intricate.", noise)),
        notes=(
            Note("It is better.", "agrees", "By 3 points."),
            Note(HOSTILE, "differs", HOSTILE),
            Note("It is the same.", "open", "One seed."),
            Note("It is exact.", "agrees", "To 1e-16.", beyond=True),
        ),
        protocol=f"First paragraph.\n\nSecond paragraph {HOSTILE}.",
        commands=(("As the paper has it:", f"topk-registry study noise --budget paper --losses '{HOSTILE}'"),),
    )
    failed = (record(configuration={"loss": HOSTILE}, result={}, error=f"Traceback\n  a line\nValueError: {HOSTILE}"),)
    first = Section(
        "noise", "Label noise", "Does it help?", "Berrada et al., Table 1", findings, (record(), record()), failed,
        "topk-registry study noise",
    )  # fmt: skip
    return [first, Section("small-data", "Small data", HOSTILE, HOSTILE, Findings(), ())]
