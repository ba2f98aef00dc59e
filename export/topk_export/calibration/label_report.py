"""The report of a calibration of several labels, as one page."""

import numpy as np

from topk_export.calibration.label_run import CalibratedLabels, mean_average_precision
from topk_registry.pages import bars, page, paragraph, table

SHOWN = 20
NAMES = {
    "mean_size": "mean size",
    "median_size": "median size",
    "empty": "empty sets",
    "macro_recall": "share of labels in the set, mean over classes",
    "worst_class_recall": "the same of the worst class",
}


def label_report_page(found: CalibratedLabels) -> str:
    """The whole report as the text of an HTML page."""
    facts = found.facts
    lead = (
        f"{facts['samples']} calibration samples, {facts['samples_without_labels']} of them without labels, and "
        f"{facts['report_samples']} others to judge. Promised: {facts['guarantee']}; for images like those of the "
        "calibration."
    )
    shown = [(key, value) for key, value in facts.items() if not key.startswith("report_")]
    sections = [
        ("Missed labels", _missed(found)),
        ("Sizes", _sizes(found)),
        ("Chosen labels", _chosen(found)),
        ("By class", _by_class(found)),
        ("Facts", table(("fact", "value"), shown)),
    ]
    return page("Several labels: calibration report", lead, sections)


def _missed(calibrated: CalibratedLabels) -> str:
    summary = calibrated.counts.summary()
    rows = [
        (
            "false negative rate: the mean share of an image's labels that its set misses",
            summary["false_negative_rate"],
        ),
        ("95 % interval of that mean, from these samples (normal law)", calibrated.counts.interval),
        ("promised", calibrated.facts["alpha"]),
        ("images without labels, which miss none", f"{calibrated.counts.unlabelled} of {calibrated.counts.total}"),
    ]
    return table(("", ""), rows + [(NAMES[name], summary[name]) for name in NAMES])


def _sizes(calibrated: CalibratedLabels) -> str:
    seen = calibrated.counts.sizes
    last = int(np.flatnonzero(seen)[-1])
    width = -(-(last + 1) // 40)
    groups = [(f"{i}" if width == 1 else f"{i}-{min(last, i + width - 1)}", float(seen[i : i + width].sum()))
              for i in range(0, last + 1, width)]  # fmt: skip
    return bars(groups, label="How many sets have each size", of="classes in the set")


def _chosen(calibrated: CalibratedLabels) -> str:
    summary, fallen = calibrated.chosen.summary(), calibrated.thresholds.fallen_back
    text = (
        "Classes whose probability reaches their own threshold, the one of the largest F1 on the calibration samples."
    )
    if len(fallen):
        names = ", ".join(calibrated.class_names[c] for c in fallen[:SHOWN])
        text += (
            f" {len(fallen)} classes are the label of no calibration sample and have the threshold "
            f"{calibrated.thresholds.values[fallen[0]]:g}: {names}{', ...' if len(fallen) > SHOWN else ''}."
        )
    rows = [
        ("F1 over all labels (micro)", summary["micro_f1"]),
        ("F1, mean over classes (macro)", summary["macro_f1"]),
        ("labels chosen an image", summary["mean_size"]),
        ("mean average precision, of no threshold", mean_average_precision(calibrated)),
    ]
    return paragraph(text) + table(("", ""), rows)


def _by_class(calibrated: CalibratedLabels) -> str:
    counts, chosen = calibrated.counts, calibrated.chosen
    present = np.flatnonzero(counts.seen)
    recall = counts.hits[present] / counts.seen[present]
    f1 = 2 * chosen.hits / np.maximum(1, chosen.seen + chosen.chosen)
    rows = [
        (calibrated.class_names[c], int(counts.seen[c]), int(calibrated.thresholds.positives[c]), float(share),
         float(counts.chosen[c] / counts.total), float(calibrated.thresholds.values[c]), float(f1[c]),
         float(calibrated.precision[c]))
        for c, share in sorted(zip(present, recall, strict=True), key=lambda pair: pair[1])[:SHOWN]
    ]  # fmt: skip
    columns = ("class", "labels", "calibration labels", "of these in the set", "share of sets with it", "threshold",
               "F1", "average precision")  # fmt: skip
    text = f"The {len(rows)} classes of {len(present)} whose labels sets miss most:"
    return paragraph(text) + table(columns, rows)
