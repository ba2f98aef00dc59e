"""Pictures of the guide, drawn while the site is built: the decision, and the k-subset operator from scratch."""

import json
from itertools import combinations
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import topk_registry as tr
from topk_studies.report import claims, quotes

LETTERS = "ABCDE"
SCORES = torch.tensor([[2.0, 1.6, 1.0, 0.0, -1.0]], dtype=torch.float64)  # the row of the whole page
BLUE, ORANGE, GREY = "C0", "C1", "0.6"

# one question a line, and the loss of a yes; losses that no study of ours compares are marked as such
FOLDER = Path(__file__).parents[1] / "results"
RESULTS = quotes.read(FOLDER)
PICTURED = (*quotes.PAGES, "small_sets")  # pages of results with a picture of every difference
STUDIED = quotes.studied(RESULTS)
DECISION = (
    ("Is one answer shown, are labels clean\nand classes balanced?", "ce"),
    ("Is there a long tail, and do\nrare classes count as much?", "logit_adjustment"),
    ("Are labels wrong within groups of similar\nclasses, or images few?", "smooth_topk_svm"),
    ("Are labels wrong anywhere,\nor is one answer shown?", "generalised_\ncross_entropy"),
    ("Do you need the chance of the label\nbeing among the k shown?", "topk_nll"),
    ("Do the logits of all classes\nnot fit in memory?", "LinearSmoothTopK"),
)


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def advised(answer: str) -> str:
    """An answer of the decision, with a word where no study of ours compares it."""
    return answer if answer.replace("\n", "") in STUDIED else f"{answer}\n(no study of ours)"


def decision() -> Figure:
    """A ladder of questions: yes leads to a loss, no to the next question."""
    figure, axes = plt.subplots(figsize=(7.2, 7.4), layout="constrained")
    axes.set(xlim=(0, 10), ylim=(-len(DECISION) - 0.6, 0.7))
    axes.axis("off")
    arrow = {"arrowstyle": "-|>", "color": "0.4", "shrinkA": 0, "shrinkB": 0}
    box = {"boxstyle": "round,pad=0.5", "facecolor": "none"}
    for i, (question, answer) in enumerate(DECISION):
        axes.text(3, -i, question, ha="center", va="center", fontsize=10, bbox={**box, "edgecolor": GREY})
        axes.text(8.3, -i, advised(answer), ha="center", va="center", fontsize=10, bbox={**box, "edgecolor": BLUE})
        axes.annotate("", (6.75, -i), (5.75, -i), arrowprops=arrow)
        axes.text(6.2, -i + 0.1, "yes", ha="center", fontsize=9)
        axes.annotate("", (3, -i - 0.68), (3, -i - 0.36), arrowprops=arrow)
        axes.text(3.1, -i - 0.56, "no", fontsize=9)
    last = {**box, "edgecolor": ORANGE}
    axes.text(
        3, -len(DECISION), "ce and smooth_topk_svm, and compare", ha="center", va="center", fontsize=10, bbox=last
    )
    return figure


def sets() -> Figure:
    """Every set of two classes out of five, with its probability."""
    k = 2
    pairs = list(combinations(range(SCORES.shape[1]), k))
    weights = torch.stack([SCORES[0, list(pair)].sum().exp() for pair in pairs])
    chances = weights / weights.sum()
    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    colours = [BLUE if 0 in pair else GREY for pair in pairs]
    axes.bar(["".join(LETTERS[i] for i in pair) for pair in pairs], chances, color=colours)
    axes.set(ylabel="probability of the set")
    axes.set_title(f"blue: the sets with A, together {chances[[0 in pair for pair in pairs]].sum():.3f}", fontsize=10)
    _bare(axes)
    return figure


def marginals() -> Figure:
    """Marginals of the same row for each k."""
    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    places = torch.arange(SCORES.shape[1])
    for k in (1, 2, 3, 4):
        values = tr.functional.topk_marginals(SCORES, k=k)[0]
        axes.bar(places + 0.2 * (k - 2.5), values, 0.18, label=f"k = {k}")
    axes.set_xticks(places.tolist(), LETTERS)
    axes.set(ylabel="marginal")
    axes.legend(fontsize=8)
    _bare(axes)
    return figure


def temperatures() -> Figure:
    """Marginals and margins of the same row against the temperature."""
    theta = torch.logspace(-1.5, 1.5, 60, dtype=torch.float64)
    rows = SCORES / theta[:, None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3), layout="constrained")
    shares = tr.functional.topk_marginals(rows, k=2)
    gaps = theta[:, None] * tr.functional.topk_log_odds(rows, k=2)
    for i, letter in enumerate(LETTERS):
        left.semilogx(theta, shares[:, i], label=letter)
        right.semilogx(theta, gaps[:, i], label=letter)
    left.axhline(2 / 5, color=GREY, linewidth=0.8, linestyle="--")
    left.set(xlabel="temperature", title="marginal, k = 2")
    right.set(xlabel="temperature", title="margin, k = 2")
    right.set_ylim(-6, 6)
    left.legend(fontsize=8)
    for axes in (left, right):
        _bare(axes)
    return figure


def hinges() -> Figure:
    """The smooth SVM against the label's score, for several tau."""
    label = torch.linspace(-4, 8, 301, dtype=torch.float64)
    rows = torch.cat((label[:, None], SCORES.expand(len(label), -1)), 1)
    target = torch.zeros(len(label), dtype=torch.int64)
    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    for tau in (0.01, 0.1, 1.0):
        loss = tr.create_loss("smooth_topk_svm", k=2, tau=tau, reduction="none")
        axes.plot(label, loss(rows, target), label=f"tau = {tau:g}")
    best = SCORES[0].sort(descending=True).values[1].item()
    axes.axvline(best, color=GREY, linewidth=0.8)
    axes.text(best, axes.get_ylim()[1], " second best of the others", fontsize=8, va="top")
    axes.set(xlabel="score of the label", ylabel="loss, k = 2")
    axes.legend(fontsize=8)
    _bare(axes)
    return figure


def draw(folder: Path) -> None:
    """Write every picture of this module as ``folder/NAME.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in (decision, sets, marginals, temperatures, hinges):
        figure = make()
        figure.savefig(folder / f"{make.__name__}.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    for page in PICTURED:
        found = json.loads((FOLDER / f"{page}.json").read_text(encoding="utf-8"))
        figure = claims.picture(claims.differences(found))
        figure.savefig(folder / f"claims_{page}.svg", transparent=True, metadata={"Date": None})
