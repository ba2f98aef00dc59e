"""The report of a calibration: coverage and sizes on samples that it did not see, as numbers and as one page."""

from typing import Any

import numpy as np

from topk_export.calibration.run import Calibrated
from topk_registry.oldsets import binomial_interval, coverage_interval
from topk_registry.pages import bars, lines, page, paragraph, table

GROUPS = 4
SHOWN = 20
NAMES = {
    "mean_size": "mean size",
    "median_size": "median size",
    "singletons": "sets of one class",
    "empty": "empty sets",
    "macro_coverage": "macro coverage, the mean over classes",
    "worst_class_coverage": "coverage of the worst class",
    "worst_size_coverage": "coverage of the worst range of sizes",
}


def coverage_lines(found: Calibrated) -> dict[str, Any]:
    """Coverage on the report's samples with its exact interval, and what calibration alone lets expect.

    The Beta law is of one threshold that no two samples share; others cover more than it says.
    """
    facts, counts = found.facts, found.counts
    hits = int(counts.hits.sum())
    values: dict[str, Any] = {
        "coverage": hits / counts.total,
        "interval": binomial_interval(hits, counts.total),
        "wanted": 1 - facts["alpha"],
    }
    if facts["samples_at_threshold"] == 1:
        values["expected"] = coverage_interval(facts["samples"], facts["alpha"])
    return values


def report_page(found: Calibrated) -> str:
    """The whole report as the text of an HTML page."""
    facts, level = found.facts, 1 - found.facts["alpha"]
    sections = [
        ("Coverage", _coverage(found)),
        ("Sizes", _sizes(found)),
        ("Coverage by size", _by_size(found, level)),
        ("Coverage by class", _by_class(found, level)),
        ("Coverage by frequency", _by_frequency(found, level)),
        *([("Coverage by group", _by_group(found, level))] if found.groups else []),
        ("Temperature", _temperatures(found)),
        (
            "Facts",
            table(
                ("fact", "value"),
                [(k, v) for k, v in facts.items() if k not in ("tree", "groups") and not k.startswith("report_")],
            ),
        ),
    ]
    lead = (
        f"Score {facts['score']}, {facts['samples']} calibration samples, {facts['report_samples']} others to judge. "
        f"Promised: {facts['guarantee']}, for images like those of the calibration."
    )
    return page("Prediction sets: calibration report", lead, sections)


def _coverage(calibrated: Calibrated) -> str:
    values = coverage_lines(calibrated)
    rows = [
        ("coverage", values["coverage"]),
        ("exact 95 % interval of the coverage, from these samples", values["interval"]),
        ("wanted", values["wanted"]),
    ]
    if "expected" in values:
        rows.append(("95 % of calibrations of this many samples have a coverage of (Beta law)", values["expected"]))
    summary = calibrated.counts.summary()
    return table(("", ""), rows + [(NAMES[name], summary[name]) for name in NAMES if name in summary])


def _sizes(calibrated: Calibrated) -> str:
    seen = calibrated.counts.size_seen
    last = int(np.flatnonzero(seen)[-1])
    width = -(-(last + 1) // 40)
    groups = [(f"{i}" if width == 1 else f"{i}-{min(last, i + width - 1)}", float(seen[i : i + width].sum()))
              for i in range(0, last + 1, width)]  # fmt: skip
    return bars(groups, label="How many sets have each size", of="classes in the set")


def _by_size(calibrated: Calibrated, level: float) -> str:
    rows = calibrated.counts.by_size()
    plot = bars(
        [(r["size"], r["coverage"]) for r in rows], label="Coverage by size", of="classes in the set", level=level
    )
    return plot + table(
        ("size", "samples", "coverage", "95 % interval"),
        [(r["size"], r["samples"], r["coverage"], r["interval"]) for r in rows],
    )


def _by_class(calibrated: Calibrated, level: float) -> str:
    counts = calibrated.counts
    present = np.flatnonzero(counts.seen)
    order = present[np.argsort(counts.by_class[present], kind="stable")]
    curve = [(float(i), float(counts.by_class[y])) for i, y in enumerate(order)]
    rows = [
        (calibrated.class_names[y], int(counts.seen[y]), int(calibrated.class_counts[y]), float(counts.by_class[y]),
         binomial_interval(int(counts.hits[y]), int(counts.seen[y])))
        for y in order[:SHOWN]
    ]  # fmt: skip
    below = int((counts.by_class[present] < level).sum())
    text = f"{below} of {len(present)} classes with samples are below {level:g}; the {len(rows)} lowest:"
    plot = lines({"coverage": curve}, label="Coverage of each class", of="classes, by rising coverage", level=level)
    columns = ("class", "samples", "calibration samples", "coverage", "95 % interval")
    return plot + paragraph(text) + table(columns, rows)


def _by_frequency(calibrated: Calibrated, level: float) -> str:
    counts = calibrated.counts
    order = np.argsort(calibrated.class_counts, kind="stable")
    rows = []
    for part in np.array_split(order, min(GROUPS, len(order))):
        seen, hits = int(counts.seen[part].sum()), int(counts.hits[part].sum())
        if seen:
            span = calibrated.class_counts[part]
            name = f"{span.min()} to {span.max()}"
            rows.append((name, len(part), seen, hits / seen, binomial_interval(hits, seen)))
    columns = ("calibration samples a class", "classes", "samples", "coverage", "95 % interval")
    plot = bars(
        [(r[0], r[3]) for r in rows], label="Coverage by frequency", of="calibration samples a class", level=level
    )
    return plot + table(columns, rows)


def _by_group(calibrated: Calibrated, level: float) -> str:
    rows = []
    for group in calibrated.groups:
        share = group.coverage if group.seen else "no samples"
        interval = group.interval if group.seen else ""
        note = f"{group.missing} calibration samples missing: sets hold all classes" if group.missing else ""
        rows.append((group.name, group.samples, group.seen, share, interval, group.mean_size, note))
    plot = bars(
        [(r.name, r.coverage) for r in calibrated.groups if r.seen], label="Coverage by group", of="group", level=level
    )
    columns = ("group", "calibration samples", "samples", "coverage", "95 % interval", "mean size", "")
    return plot + table(columns, rows)


def _temperatures(calibrated: Calibrated) -> str:
    rows = [(row["temperature"], row["mean_size"]) for row in calibrated.temperatures]
    text = (
        "The temperature that makes labels most likely is not the one that makes sets small. Mean size of sets of this "
        "score with one threshold, on calibration samples:"
    )
    return paragraph(text) + table(("temperature", "mean size"), rows)
