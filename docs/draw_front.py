"""Script that draws the picture of the README: ``python docs/draw_front.py`` writes ``docs/pictures/front.svg``.

The script writes the SVG elements without a plotting library. The colors are readable on light and dark pages.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

import topk_registry as tr

PICTURE = Path(__file__).parent / "pictures" / "front.svg"
INK, FIRST, SECOND = "#7d8590", "#2f81f7", "#e5732a"
PANEL = (350, 170)  # width and height of the plot in a panel
SCORES = [3.2, 2.9, 2.7, 2.2, 1.0, 0.6, 0.2, -0.5, -1.0, -1.5]  # left panel: four similar scores for k = 3
K = 3
TAUS = {0.1: "", 1.0: "6 4"}  # values of tau, the default and a larger one, with the dash pattern of the line
LABEL = (-4.0, 16.0)  # right panel: range of the label's score
OTHERS = torch.tensor([7, 6.5, 6, 5.5, 0, -0.4, -0.8, -1.2, -1.6, -2], dtype=torch.float64)  # right panel: other scores


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{words}</text>'


def line(points: Iterable[tuple[float, float]], colour: str, width: float = 2, dash: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def bars(values: Sequence[float], shift: float, colour: str) -> Iterable[str]:
    step = PANEL[0] / len(values)
    for i, value in enumerate(values):
        height = value * (PANEL[1] - 10)
        yield (
            f'<rect x="{i * step + shift:.1f}" y="{PANEL[1] - height:.1f}" width="{step * 0.36:.1f}" '
            f'height="{height:.1f}" fill="{colour}"/>'
        )


def probabilities() -> Iterable[str]:
    """Yield the SVG elements of the left panel: softmax and top-k marginals of one row of scores."""
    scores = torch.tensor([SCORES], dtype=torch.float64)
    yield text(0, -30, f"One image, ten classes, k = {K}", size=15)
    yield text(0, -11, f"top-{K} marginals", colour=FIRST)
    yield text(PANEL[0], -11, "softmax", colour=SECOND, anchor="end")
    yield from bars(tr.functional.topk_marginals(scores, k=K)[0].tolist(), 3, FIRST)
    yield from bars(scores.softmax(-1)[0].tolist(), 17, SECOND)
    yield line([(0, PANEL[1]), (PANEL[0], PANEL[1])], INK, 1)
    for i, score in enumerate(SCORES):
        yield text((i + 0.5) * PANEL[0] / len(SCORES), PANEL[1] + 17, f"{score:g}", anchor="middle", size=12)
    yield text(PANEL[0] / 2, PANEL[1] + 36, "score of each class", anchor="middle")


def gradients(values: torch.Tensor, score: torch.Tensor) -> list[float]:
    """Return the gradient of each loss with respect to ``score``, divided by the gradient of largest absolute value."""
    (slope,) = torch.autograd.grad(values.sum(), score)
    return (slope / slope.min()).tolist()


def losses() -> Iterable[str]:
    """Yield the SVG elements of the right panel: gradients of two losses as functions of the label's score."""
    score = torch.linspace(*LABEL, 121, dtype=torch.float64).requires_grad_()
    rows = torch.cat((score[:, None], OTHERS.expand(len(score), -1)), 1)
    target = torch.zeros(len(rows), dtype=torch.int64)
    entropy = F.cross_entropy(rows, target, reduction="none")
    hinges = {tau: tr.create_loss("smooth_topk_svm", k=5, tau=tau, reduction="none")(rows, target) for tau in TAUS}

    def place(at: float, value: float) -> tuple[float, float]:
        return (at - LABEL[0]) / (LABEL[1] - LABEL[0]) * PANEL[0], PANEL[1] - value * (PANEL[1] - 30)

    yield text(0, -30, "Gradient at the label, k = 5", size=15)
    yield text(0, -11, "smooth_topk_svm: tau = 0.1, dashed 1", colour=FIRST, size=12)
    yield text(PANEL[0], -11, "cross-entropy", colour=SECOND, anchor="end")
    for rival in OTHERS.tolist():
        x = place(rival, 0)[0]
        yield line([(x, PANEL[1] - 6), (x, PANEL[1] + 6)], INK, 1)
    yield text(place(OTHERS[0].item(), 0)[0] + 6, PANEL[1] - 8, "four rivals", size=12)
    yield line([(0, PANEL[1]), (PANEL[0], PANEL[1])], INK, 1)
    drawn = [(entropy, SECOND, ""), *((hinges[tau], FIRST, dash) for tau, dash in TAUS.items())]
    for values, colour, dash in drawn:
        points = [place(*pair) for pair in zip(score.tolist(), gradients(values, score), strict=True)]
        yield line(points, colour, dash=dash)
    for tick in range(-4, 17, 4):
        yield text(place(tick, 0)[0], PANEL[1] + 20, str(tick), anchor="middle", size=12)
    yield text(PANEL[0] / 2, PANEL[1] + 38, "score of the label", anchor="middle")


def picture() -> str:
    panels = [
        f'<g transform="translate({x} 50)">{"".join(panel)}</g>'
        for x, panel in ((15, probabilities()), (425, losses()))
    ]
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 262" font-family="sans-serif">'
    return "\n".join([head, *panels, "</svg>\n"]).replace("><", ">\n<")


if __name__ == "__main__":
    PICTURE.write_text(picture())
