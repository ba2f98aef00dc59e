"""Script that draws the picture of the README: ``python docs/draw_front.py`` writes ``docs/pictures/front.svg``.

The background is transparent, and the colors are readable on light and dark pages.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import topk_registry as tr

PICTURE = Path(__file__).parent / "pictures" / "front.svg"
INK, FIRST, SECOND = "#7d8590", "#2f81f7", "#e5732a"
SCORES = [3.2, 2.9, 2.7, 2.2, 1.0, 0.6, 0.2, -0.5, -1.0, -1.5]  # left panel: four similar scores for k = 3
OTHERS = [7, 6.5, 6, 5.5, 0, -0.4, -0.8, -1.2, -1.6, -2]  # right panel: scores of the other classes
TAUS = {0.1: "-", 1.0: "--"}  # right panel: values of tau, the default and a larger one, with the style of the line


def draw_probabilities(axes: Axes) -> None:
    """Draw softmax and top-k marginals of one row of scores."""
    scores = torch.tensor([SCORES], dtype=torch.float64)
    places = np.arange(len(SCORES))
    axes.bar(places - 0.2, tr.topk_marginals(scores, k=3)[0].numpy(), 0.38, color=FIRST, label="top-3 marginals")
    axes.bar(places + 0.2, scores.softmax(-1)[0].numpy(), 0.38, color=SECOND, label="softmax")
    axes.set_xticks(places, [f"{score:g}" for score in SCORES])
    axes.set(title="One image, ten classes, k = 3", xlabel="score of each class", ylim=(0, 1))


def draw_gradients(axes: Axes) -> None:
    """Draw the gradients of losses with respect to the label's score, each divided by its largest absolute value."""
    score = torch.linspace(-4, 20, 121, dtype=torch.float64).requires_grad_()
    rows = torch.cat((score[:, None], torch.tensor(OTHERS, dtype=torch.float64).expand(len(score), -1)), 1)
    target = torch.zeros(len(rows), dtype=torch.int64)

    def draw(values: torch.Tensor, color: str, style: str, label: str) -> None:
        (slope,) = torch.autograd.grad(values.sum(), score)
        axes.plot(score.detach(), slope / slope.min(), style, color=color, label=label)

    for tau, style in TAUS.items():
        loss = tr.create_loss("smooth_topk_svm", k=5, tau=tau, reduction="none")
        draw(loss(rows, target), FIRST, style, f"smooth_topk_svm, tau = {tau:g}")
    draw(F.cross_entropy(rows, target, reduction="none"), SECOND, "-", "cross-entropy")
    axes.plot(OTHERS, [0] * len(OTHERS), "|", color=INK, label="scores of the other classes")
    axes.set(title="Gradient at the label, k = 5", xlabel="score of the label", xlim=(-4, 20))


if __name__ == "__main__":
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(names, INK) | {"svg.hashsalt": "topk", "svg.fonttype": "none"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    draw_probabilities(left)
    draw_gradients(right)
    for axes in (left, right):
        axes.legend(loc="upper right", frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})
