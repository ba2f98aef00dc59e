"""Compare results with those of other packages, and write the largest difference of each comparison.

    python -m benchmarks.peers --output docs/results/peers.json

The command also prints the table of ``docs/reference/how_checked.md``. The comparisons need the extra ``peers`` and the
package torchcp: ``pip install --no-deps torchcp``. ``tests/test_peers.py`` runs the comparisons whose package is
installed, and expects differences below the bounds.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from torch import Tensor, nn

import topk_registry as tr
from topk_plugins._margins import relative_gaps
from topk_plugins.sparse_topk import topk_mask
from topk_registry.conformal import Score, binomial_interval, calibrate, log_probabilities, threshold
from topk_registry.files import write_text
from topk_registry.metrics import LabelSetMetrics

COMMAND = "python -m benchmarks.peers --output docs/results/peers.json"
N, ROWS = 9, 12
LABELS = torch.arange(ROWS) % N
COUNTS = [100, 50, 3, 7, 1, 20, 9, 4, 2]
ALPHAS = (0.05, 0.1, 0.3)
# packages that torchcp imports for other methods; torchsort compiles for minutes
GRAPHS = ("torch_geometric", "torch_geometric.loader", "torch_geometric.nn", "torch_geometric.utils")
UNUSED_BY_TORCHCP = (*GRAPHS, "torch_geometric.utils.convert", "torchsort", "transformers")

Pairs = Iterator[tuple[Any, Any]]  # results of this project and of the other package


@dataclass(frozen=True)
class Comparison:
    """Results of this project and of another package.

    Args:
        package: name of the distribution.
        quantity: what is compared.
        pairs: function that yields the results of this project and of the package.
        bound: largest allowed difference. The unit is the largest absolute value of the package's result, or one
            class of a set if ``sets``.
        precision: floating-point type of the results.
        sets: whether the results are sets, of which differing classes are counted.
    """

    package: str
    quantity: str
    pairs: Callable[[], Pairs]
    bound: float
    precision: str = "float64"
    sets: bool = False

    def difference(self) -> float:
        """Return the largest difference of all pairs."""
        return max(self._difference(*(np.asarray(value) for value in pair)) for pair in self.pairs())

    def _difference(self, found: np.ndarray, wanted: np.ndarray) -> float:
        if found.shape != wanted.shape:
            raise ValueError(f"expected the shape {wanted.shape} of {self.package}, got {found.shape}")
        if self.sets:
            return float((found != wanted).sum())
        return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def logits(n: int = N, *, scale: float = 2.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(ROWS, n, dtype=torch.float64, generator=generator)).to(dtype)


def with_gradients(ours: nn.Module, theirs: nn.Module, scores: Tensor, target: Tensor = LABELS) -> Pairs:
    """Yield the values of two losses, and their gradients with respect to the scores."""
    a, b = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    found, wanted = ours(a, target), theirs(b, target)
    yield found.detach(), wanted.detach()
    found.sum().backward()
    wanted.sum().backward()
    yield a.grad, b.grad


def torch_cross_entropy() -> Pairs:
    weight = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    for options in ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.1}):
        for target in (LABELS, logits(seed=2).softmax(1)):
            theirs = nn.CrossEntropyLoss(**options)
            yield from with_gradients(tr.create_loss("topk_nll", k=1, tau=1.0, **options), theirs, logits(), target)
    yield from with_gradients(tr.create_loss("ksubset_nll"), nn.CrossEntropyLoss(), logits())


def timm_losses() -> Pairs:
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    smoothed = tr.create_loss("topk_nll", k=1, tau=1.0, label_smoothing=0.1)
    yield from with_gradients(smoothed, LabelSmoothingCrossEntropy(0.1), logits())
    mixed = tr.create_loss("topk_nll", k=1, tau=1.0)
    yield from with_gradients(mixed, SoftTargetCrossEntropy(), logits(), logits(seed=2).softmax(1))


def timm_metrics() -> Pairs:
    from timm.utils import accuracy

    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(500, 20, generator=generator), torch.randint(20, (500,), generator=generator)
    metric = tr.metrics.TopKAccuracy((1, 5), num_classes=20)
    metric.update(scores, labels)
    found = metric.compute()
    yield [100 * found["top1"], 100 * found["top5"]], [float(value) for value in accuracy(scores, labels, (1, 5))]


def marginals_of_decimals() -> Pairs:
    from tests.oracles import mp_marginals

    for n, k, scale in ((50, 5, 1.0), (300, 5, 10.0), (300, 50, 3.0)):
        scores = logits(n, scale=scale)[:2]
        yield tr.topk_marginals(scores, k=k), [mp_marginals(row, k) for row in scores.tolist()]


def smooth_svm_of_decimals() -> Pairs:
    from tests.oracles import mp_smooth_svm

    for n, k, tau in ((50, 5, 1.0), (300, 5, 0.1), (300, 20, 0.5)):
        scores = logits(n)[:2].requires_grad_()
        found = tr.create_loss("smooth_topk_svm", k=k, tau=tau, reduction="none")(scores, LABELS[:2])
        (gradient,) = torch.autograd.grad(found.sum(), scores)
        exact = [mp_smooth_svm(row, y, k, tau) for y, row in enumerate(scores.tolist())]
        yield found.detach(), [value for value, _ in exact]
        yield gradient, [slope for _, slope in exact]


def entmax_masks() -> Pairs:
    import entmax

    for k in (1, 3, 8):
        for scale in (0.1, 1.0, 30.0):
            scores = logits(scale=scale)
            # 50 steps, the default of this bisection, leave an error of 1e-13 of the spread of the scores
            yield topk_mask(scores, k)[0], entmax.budget_bisect(scores, budget=k, n_iter=70)


def entmax_losses() -> Pairs:
    import entmax

    theirs = entmax.SparsemaxLoss(reduction="elementwise_mean")
    yield from with_gradients(tr.create_loss("sparse_topk", k=1), theirs, logits())


def difftopk_losses() -> Pairs:
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints which of its parts are not available
        from difftopk.losses import TopKCrossEntropyLoss

    n, tau = 8, 4.0
    for relaxation in ("neuralsort", "softsort"):
        for top1, mode in (("softmax", "sm"), ("sort", "sort")):
            for m in (None, 4):
                theirs = TopKCrossEntropyLoss(relaxation, 1 / tau, [0.2, 0.0, 0.8], n=n, m=m, top1_mode=mode)
                options = {"relaxation": relaxation, "tau": tau, "top1": top1, "candidates": m}
                ours = tr.create_loss("differentiable_topk", k=[1, 3], k_weights=[0.2, 0.8], **options)
                yield from with_gradients(ours, theirs, logits(n, scale=1.0, dtype=torch.float32), LABELS % n)


def pytopk_losses() -> Pairs:
    from pytopk.functional import bal_noised_topk_loss, imbal_noised_topk_loss
    from pytopk.noised_topk import _noised_topk

    scores, k, draws = logits(dtype=torch.float32), 3, 4
    noise = torch.stack([_normal(scores.shape, seed=0, skip=i) for i in range(draws)], -1)  # [B, n, draws]
    margins = (0.4 * relative_gaps(COUNTS)).float()

    def balanced(s: Tensor, target: Tensor) -> Tensor:
        return bal_noised_topk_loss(s, target, k, 0.7, _noised_topk, noise)

    def imbalanced(s: Tensor, target: Tensor) -> Tensor:
        return imbal_noised_topk_loss(s, target, k, margins, 0.2, _noised_topk, noise, 20)

    counts = {"class_counts": COUNTS, "max_margin": 0.4, "scale": 20}
    losses = (("noised_topk", 0.7, {}, balanced), ("noised_topk_imbalanced", 0.2, counts, imbalanced))
    for name, epsilon, options, theirs in losses:
        ours = tr.create_loss(name, k=k, epsilon=epsilon, num_samples=draws, **options)
        with tr.use_backend("torch"), torch.random.fork_rng():
            torch.manual_seed(0)  # the loss draws the same noise
            yield from with_gradients(ours, theirs, scores)


def _normal(shape: torch.Size, *, seed: int, skip: int) -> Tensor:
    """Return the draw number ``skip`` of a generator."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(skip):
        torch.empty(shape).normal_(generator=generator)
    return torch.empty(shape).normal_(generator=generator)


def sklearn_metrics() -> Pairs:
    from sklearn.metrics import average_precision_score, f1_score, top_k_accuracy_score

    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(500, 20, generator=generator, dtype=torch.float64)
    target = (torch.rand(500, 20, generator=generator) < 0.3).double()
    metric = LabelSetMetrics(20)
    metric.update(scores, target)
    found = metric.compute()
    truth, claimed = target.numpy(), (scores.sigmoid() >= 0.5).numpy()
    wanted = [f1_score(truth, claimed, average=average) for average in ("micro", "macro", "samples")]
    yield [found[name] for name in ("micro_f1", "macro_f1", "sample_f1")], wanted
    yield found["map"], average_precision_score(truth, scores.numpy(), average="macro")
    labels = torch.randint(20, (500,), generator=generator)
    accuracy = tr.metrics.TopKAccuracy((1, 5), num_classes=20)
    accuracy.update(scores, labels)
    found = accuracy.compute()
    yield (
        [found["top1"], found["top5"]],
        [top_k_accuracy_score(labels.numpy(), scores.numpy(), k=k, labels=range(20)) for k in (1, 5)],
    )


def scipy_intervals() -> Pairs:
    from scipy.stats import binomtest

    for hits, total in ((0, 10), (7, 10), (380, 400), (3999, 4000)):
        yield list(binomial_interval(hits, total)), list(binomtest(hits, total).proportion_ci(method="exact"))


def calibration() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits of 1000 calibration samples, their labels, and logits of 1000 new samples."""
    rng = np.random.default_rng(0)
    known, new = rng.normal(scale=2.0, size=(2, 1000, 20))
    return known, (0.7 * known + rng.gumbel(size=known.shape)).argmax(1), new


def with_best(sets: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the sets with the most probable class of each sample, which every set of this project contains."""
    return sets | (np.arange(scores.shape[1]) == scores.argmax(1)[:, None])


def mapie_sets() -> Pairs:
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        """Classifier whose inputs are the logits."""

        classes_ = np.arange(20)

        def predict_proba(self, x: np.ndarray) -> np.ndarray:
            return np.asarray(torch.from_numpy(x).softmax(1))

        def predict(self, x: np.ndarray) -> np.ndarray:
            return x.argmax(1)

        def __sklearn_is_fitted__(self) -> bool:
            return True

    known, labels, new = calibration()
    for alpha in ALPHAS:
        theirs = SplitConformalClassifier(Given(), confidence_level=1 - alpha, conformity_score="lac", prefit=True)
        _, sets = theirs.conformalize(known, labels).predict_set(new)
        yield calibrate(known, labels, alpha=alpha, score="lac")(new), with_best(sets[..., 0], new)


def torchcp_scores() -> Pairs:
    with patch.dict(sys.modules, {name: MagicMock() for name in UNUSED_BY_TORCHCP}):
        from torchcp.classification.score import APS, LAC, RAPS
        from torchcp.utils.common import calculate_conformal_value

    rows, labels, _ = calibration()
    log_p, at = log_probabilities(rows), (np.arange(len(labels)), labels)
    kinds = (
        (1 - np.exp(-Score("lac")(log_p)), LAC()(torch.from_numpy(rows))),
        (Score("aps")(log_p), APS(randomized=False)(torch.from_numpy(rows))),
        (
            Score("raps", penalty=0.01, k_reg=5)(log_p),
            RAPS(randomized=False, penalty=0.01, kreg=5)(torch.from_numpy(rows)),
        ),
    )
    for found, wanted in kinds:
        yield found, wanted
        for alpha in ALPHAS:
            yield threshold(found[at], alpha), calculate_conformal_value(wanted[at], alpha)


COMPARISONS = (
    Comparison("torch", "`topk_nll` with k = 1 and `ksubset_nll`, value and gradient", torch_cross_entropy, 1e-12),
    Comparison("timm", "`topk_nll` with k = 1, smoothed and mixed labels, value and gradient", timm_losses, 1e-12),
    Comparison("timm", "top-1 and top-5 accuracy", timm_metrics, 1e-6, "float32"),
    Comparison("entmax", "masks of `sparse_topk`, k = 1, 3 and 8", entmax_masks, 1e-10),
    Comparison("entmax", "`sparse_topk` with k = 1, value and gradient", entmax_losses, 1e-12),
    Comparison("difftopk", "`differentiable_topk`, value and gradient", difftopk_losses, 1e-4, "float32"),
    Comparison("pytopk", "`noised_topk` and `noised_topk_imbalanced`", pytopk_losses, 1e-5, "float32"),
    Comparison("decimal", "top-k marginals in 60 digits, n up to 300, k up to 50", marginals_of_decimals, 1e-12),
    Comparison("decimal", "`smooth_topk_svm` in 60 digits, value and gradient", smooth_svm_of_decimals, 1e-12),
    Comparison("scikit-learn", "F1, average precision and top-k accuracy", sklearn_metrics, 1e-12),
    Comparison("scipy", "95 % intervals of the coverage", scipy_intervals, 1e-8),
    Comparison("mapie", "prediction sets with the score `lac`", mapie_sets, 0, sets=True),
    Comparison(
        "torchcp", "conformal scores `lac`, `aps` and `raps`, and their thresholds", torchcp_scores, 1e-7, "float32"
    ),
)


def version_of(package: str) -> str:
    """Return the version of a distribution. ``decimal`` belongs to Python."""
    if package == "decimal":
        return "Python " + ".".join(map(str, sys.version_info[:3]))
    return version(package)


def table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown table of the results."""
    lines = ["| Package | Version | Quantity | Precision | Largest difference |", "|---|---|---|---|---|"]
    for row in results:
        value = "0" if row["difference"] == 0 else f"{row['difference']:.0e}"
        cells = (row["package"], row["version"], row["quantity"], row["precision"], value)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run all comparisons, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    results = [
        {
            "package": each.package,
            "version": version_of(each.package),
            "quantity": each.quantity,
            "precision": each.precision,
            "unit": "classes" if each.sets else "largest value",
            "difference": each.difference(),
            "bound": each.bound,
        }
        for each in COMPARISONS
    ]
    content = {"command": COMMAND, "results": results}
    write_text(options.output, json.dumps(content, indent=1) + "\n")
    print(table(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
