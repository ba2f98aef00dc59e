"""Draw the accuracy per epoch of runs of ``timm train``.

    timm train --loss smooth_topk_svm --dataset-opt noise=0.4    # trains with the loss and with cross-entropy
    python docs/draw_curves.py output/train/*

The program reads ``summary.csv`` and ``args.yaml`` of each folder, and writes ``docs/pictures/curves.svg``. The
background is transparent, and the colors are readable on light and dark pages.
"""

import csv
import sys
from pathlib import Path

import matplotlib as mpl
import yaml
from matplotlib import pyplot as plt

PICTURE = Path(__file__).parent / "pictures" / "curves.svg"
INK, COLORS = "#7d8590", ("#2f81f7", "#e5732a", "#8957e5", "#2da44e")
METRICS = {"top1": "top-1 accuracy in %", "top5": "top-5 accuracy in %"}


def rows_of(run: Path) -> tuple[str, list[dict[str, str]]]:
    """Return the name of the loss of a run, and the metrics of each epoch."""
    settings = yaml.safe_load((run / "args.yaml").read_text(encoding="utf-8"))
    with (run / "summary.csv").open(newline="", encoding="utf-8") as file:
        return settings["loss"], list(csv.DictReader(file))


def main(runs: list[Path]) -> None:
    """Draw one panel per metric, with one line per run."""
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(names, INK) | {"svg.hashsalt": "topk", "svg.fonttype": "none"})
    figure, panels = plt.subplots(1, len(METRICS), figsize=(8, 2.8), layout="constrained")
    for run, color in zip(runs, COLORS, strict=False):
        loss, rows = rows_of(run)
        for axes, (metric, title) in zip(panels, METRICS.items(), strict=True):
            epochs = range(1, len(rows) + 1)
            axes.plot(epochs, [float(row[f"eval_{metric}"]) for row in rows], "o-", color=color, label=loss)
            axes.set(xlabel="epoch", ylabel=title)
    for axes in panels:
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
