"""``topk-registry calibrate`` for a file of several labels."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from topk_export.commands.common import say


def calibrate_labels(
    args: Any, classes: Sequence[str], output: Path, data: Mapping[str, Any], running: Mapping[str, Any]
) -> int:
    """Do what the command does with a file of several labels; return the exit status.

    Args:
        args: of the command.
        classes: the names of the file's classes.
        output: the file to write.
        data: where the images and their labels are, for ``open_label_sets``.
        running: how the file runs, for ``calibrate_label_file``.
    """
    from topk_export.calibration.data import open_label_sets
    from topk_export.calibration.label_report import label_report_page
    from topk_export.calibration.label_run import calibrate_label_file
    from topk_registry.pages import write_page

    if not (args.dataset or args.labels_csv):
        raise ValueError(
            f"{args.model} gives several labels an image, and the folders of --data-dir tell one: give --labels-csv "
            "FILE with a row for each image, or --dataset NAME of several labels"
        )
    samples = open_label_sets(args.dataset, classes, **data)
    say(samples.line)
    calibrated = calibrate_label_file(
        args.model, output, samples, alpha=args.alpha, report=args.report_share, seed=args.seed, **running
    )
    report = Path(args.report or output.with_suffix(".html"))
    write_page(report, label_report_page(calibrated))
    if args.json:
        print(json.dumps({**calibrated.facts, "file": str(output), "report": str(report)}, indent=2))
    else:
        _say(calibrated, len(classes))
        print(f"wrote       {output}\nreport      {report}")
    return 0


def _say(calibrated: Any, n: int) -> None:
    facts = calibrated.facts
    low, high = calibrated.counts.interval
    rate, size = (facts[f"report_{name}"] for name in ("false_negative_rate", "mean_size"))
    print(f"promised    {facts['guarantee']}")
    print(f"missed      {rate:.4f} ({low:.4f} to {high:.4f}) on {facts['report_samples']} other images")
    print(f"mean size   {size:.2f} of {n} classes")
    print(f"mAP         {facts.get('report_map', float('nan')):.4f}")
    print(f"F1          {facts.get('report_labels_micro_f1', float('nan')):.4f} over all labels, "
          f"{facts.get('report_labels_macro_f1', float('nan')):.4f} mean over classes")  # fmt: skip
    if len(fallen := calibrated.thresholds.fallen_back):
        threshold = calibrated.thresholds.values[fallen[0]]
        say(f"note: {len(fallen)} classes are the label of no calibration image and have the threshold {threshold:g}")
    if facts["threshold"] is None:
        say("note: so few images have labels that sets may miss all of them: every set is empty")
