"""Draw pictures of prediction sets and marginals of a small network on handwritten digits.

``python docs/draw_sets.py`` writes ``docs/pictures/sets.svg`` and ``docs/pictures/reliability.svg``. The background is
transparent, and the colors are readable on light and dark pages.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from PIL import Image
from sklearn.datasets import load_digits

import topk_registry as tr
from topk_registry.conformal import calibrate

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "programs"))
from make_digits import train  # noqa: E402

INK, FIRST, SECOND = "#7d8590", "#2f81f7", "#e5732a"
ALPHAS = np.geomspace(0.01, 0.3, 30)
TRAINING, CALIBRATION = 500, 600  # images; the other 697 are test images
BINS = np.linspace(0, 1, 11)


def logits_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Train for one epoch, and return the logits and labels of the other digits."""
    pixels, labels = load_digits(return_X_y=True)
    small = [Image.fromarray((row.reshape(8, 8) * 15).astype("uint8")) for row in pixels]
    images = np.stack([np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC).convert("RGB")) for image in small])
    model = train(images[:TRAINING], labels[:TRAINING], epochs=1)
    mean, std = (torch.tensor(model.default_cfg[name])[:, None, None] for name in ("mean", "std"))
    x = (torch.from_numpy(images[TRAINING:]).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        return model(x).double().numpy(), labels[TRAINING:]


def draw_sizes(logits: np.ndarray, labels: np.ndarray) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    known, new = slice(CALIBRATION), slice(CALIBRATION, None)
    for score, color in (("lac", FIRST), ("aps", SECOND)):
        sets = [calibrate(logits[known], labels[known], alpha=a, score=score)(logits[new]) for a in ALPHAS]
        left.plot(ALPHAS, [inside.sum(1).mean() for inside in sets], color=color, label=score)
        covered = [inside[np.arange(len(inside)), labels[new]].mean() for inside in sets]
        right.plot(ALPHAS, covered, color=color, label=score)
    right.plot(ALPHAS, 1 - ALPHAS, ":", color=INK, label="1 - alpha")
    left.set(xlabel="alpha (miscoverage)", ylabel="mean classes per set", ylim=(0, None))
    right.set(xlabel="alpha (miscoverage)", ylabel="coverage")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([0.01, 0.03, 0.1, 0.3], ["0.01", "0.03", "0.1", "0.3"])
        axes.minorticks_off()
    save(figure, (left, right), "sets")


def draw_reliability(logits: np.ndarray, labels: np.ndarray) -> None:
    figure, axes = plt.subplots(figsize=(4.2, 3.2), layout="constrained")
    scores = torch.from_numpy(logits)
    right = np.eye(logits.shape[1], dtype=bool)[labels]
    values = {"top-3 marginal": tr.topk_marginals(scores, k=3), "softmax probability": scores.softmax(-1)}
    for (name, value), color in zip(values.items(), (FIRST, SECOND), strict=True):
        place = np.digitize(value.numpy(), BINS[1:-1])
        used = [b for b in range(len(BINS) - 1) if (place == b).sum() >= 20]
        means = [(value.numpy()[place == b].mean(), right[place == b].mean()) for b in used]
        axes.plot(*zip(*means, strict=True), "o-", color=color, label=name)
    axes.plot([0, 1], [0, 1], ":", color=INK)
    axes.set(xlabel="value for a class", ylabel="share of true classes", xlim=(0, 1), ylim=(0, 1))
    save(figure, (axes,), "reliability")


def save(figure: plt.Figure, panels: tuple[plt.Axes, ...], name: str) -> None:
    for axes in panels:
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "pictures" / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(names, INK) | {"svg.hashsalt": "topk", "svg.fonttype": "none"})
    found = logits_and_labels()
    draw_sizes(*found)
    draw_reliability(*found)
