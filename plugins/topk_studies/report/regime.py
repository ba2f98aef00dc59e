"""How far a loss learns noisy labels by heart, epoch by epoch, from runs of the study of label noise.

``python -m topk_studies.report.regime DIR docs/results/regime.json`` takes the runs of ``CASES`` out of a folder of
``topk-registry study noise --dataset topk/ambiguous --max-seeds 5``: those on the seed that trials are made on.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from topk_studies.engine.store import write_file
from topk_studies.engine.tuning import TUNING_SEED

NOISE, EPOCHS = 0.8, (3, 6, 9, 12)
CASES = (("ce", 0.002), ("ce", 0.0005), ("smooth_topk_svm", 0.0005))  # losses and rates
TAU = 0.1
MEASURES = {
    "train_top1": "training labels given back, %",
    "test_top5": "top-5 on clean test labels, %",
    "test_excess_top5": "excess over the least top-5 error, points",
}

Case = Mapping[str, Any]


def collect(folder: Path) -> list[Case]:
    """The measures of each case at the epochs, from the records of a folder.

    Raises:
        ValueError: a case has no record.
    """
    by_case: dict[tuple[str, float], Case] = {}
    for path in sorted((folder / "runs" / "train").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        flags = record["configuration"]["flags"]
        told = flags["loss"], flags["lr"]
        wanted = flags["seed"] == TUNING_SEED and flags.get("label_noise") == NOISE and told in CASES
        if wanted and flags.get("loss_opt", {}).get("tau", TAU) == TAU and not record["error"]:
            rows = {int(row["epoch"]): row for row in record["result"]["history"]}
            measured = {name: [rows[epoch][name] for epoch in EPOCHS] for name in MEASURES}
            by_case[told] = {"loss": told[0], "lr": told[1], "when": record["when"], **measured}
    missing = [case for case in CASES if case not in by_case]
    if missing:
        raise ValueError(f"{folder} has no run of {missing} at noise {NOISE} on seed {TUNING_SEED}")
    return [by_case[case] for case in CASES]


def table(cases: Sequence[Case]) -> str:
    """The measures by epoch, as Markdown."""
    lines = [["", "", *map(str, EPOCHS)], ["---"] * (2 + len(EPOCHS))]
    for case in cases:
        name = "cross-entropy" if case["loss"] == "ce" else f"`{case['loss']}`, tau {TAU:g}"
        for i, (measure, words) in enumerate(MEASURES.items()):
            told = "" if i else f"{name}, rate {case['lr']:g}"
            lines.append([told, words, *(f"{value:.1f}" for value in case[measure])])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m topk_studies.report.regime DIR RESULTS.json", file=sys.stderr)
        return 2
    folder, results = map(Path, argv)
    lines = ",\n".join(json.dumps(case) for case in collect(folder))
    write_file(results, f"[\n{lines}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
