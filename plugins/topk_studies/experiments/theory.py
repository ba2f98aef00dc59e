"""Theory that can be checked: minimisers on known posteriors, the limit tau to 0, bounds, and the spherical ceiling.

A loss is top-k calibrated at a posterior p if whoever minimises its conditional risk R(s) = sum_y p_y L(s, y) finds the
k most likely classes (Yang and Koyejo 2020). Here R is minimised by BFGS from several starts. All minima of least risk
must rank the true top k first, and R must be larger on the border, where the last class of the true top k and the first
class outside have equal scores. For a convex R that decides; for others it can refute, and otherwise is evidence.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topk_registry import registry
from topk_studies.engine import registered
from topk_studies.engine.study import Configuration, Options, Progress, Record
from topk_studies.experiments.theory_findings import (
    BOUND_SCALES,
    BOUND_SHAPES,
    CEILING_LOSSES,
    CEILING_SHAPES,
    LIMIT_SHAPES,
    LIMIT_TAUS,
    POSTERIORS,
    SPARSITY,
    findings,
)

TITLE = "Theory"
QUESTION = "Do the minimisers rank the true top k, and do the papers' limits and bounds hold in numbers?"
REFERENCE = "Yang, Koyejo 2020; Berrada et al. 2018, section 3; Garcin et al. 2022, Fig. 2; de Brebisson, Vincent 2016"
RUNS = "theory"
VERSION = 2
ALONE = False

STARTS = 4
STEPS = 400
FLAT = 1e-8  # the gradient's largest entry, at a minimum
SAME = 1e-9  # risks that differ by less are of equal minima
FAR = 1e9

report = findings


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    names = list(options.losses or registry.list_losses())
    starts = STARTS if options.budget == "small" else 4 * STARTS
    return [
        *({"check": "calibration", "loss": loss, "starts": starts, **case} for loss in names for case in POSTERIORS),
        *({"check": "sparsity", "loss": loss, **SPARSITY} for loss in names),
        *({"check": "limit", "tau": tau, **shape} for shape in LIMIT_SHAPES for tau in LIMIT_TAUS),
        *({"check": "bound", "scale": scale, **shape} for shape in BOUND_SHAPES for scale in BOUND_SCALES),
        *({"check": "ceiling", "loss": loss, **shape} for loss in CEILING_LOSSES for shape in CEILING_SHAPES),
    ]


def run(configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
    """The numbers of one check; of a loss that cannot be asked, why."""
    checks = {
        "calibration": _calibration,
        "sparsity": _sparsity,
        "limit": _limit,
        "bound": _bound,
        "ceiling": _ceiling,
    }
    torch.manual_seed(0)
    try:
        return checks[configuration["check"]](configuration)
    except (ValueError, TypeError, RuntimeError) as error:
        return {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}


def _calibration(c: Configuration) -> dict[str, Any]:
    p = torch.tensor(c["posterior"], dtype=torch.float64)
    n, k = len(p), c["k"]
    rows = _rows(c["loss"], n, k)
    line, label = torch.linspace(0.0, 1.0, n, dtype=torch.float64)[None], torch.tensor([0])
    with torch.no_grad():
        losses = np.array([float(rows(line, label)) for _ in range(10)])
    if np.isnan(losses).all():  # before they are compared: NaN differs from itself
        return {"problem": "it is NaN"}
    if (losses != losses[0]).any():
        return {"problem": "it is random"}

    def risk(s: Tensor) -> Tensor:
        return rows(s.expand(n, n), torch.arange(n)).double() @ p

    order, starts = p.argsort(descending=True), _starts(p, c["starts"])
    free = _minima(risk, torch.eye(n, dtype=torch.float64), starts)
    # scores on the border: the last class of the true top k is tied with the first outside
    tie = torch.eye(n, dtype=torch.float64)
    tie[order[k]] = tie[order[k - 1]]
    inner = [i for i in range(n) if i != int(order[k])]
    tied = _minima(risk, tie[:, inner], starts[:, inner])
    least = free[0]
    ahead = [float(s[order[:k]].min() - s[order[k:]].max()) for value, _, s in free if value <= least[0] + SAME]
    return {"risk": least[0], "slope": least[1], "gap": tied[0][0] - least[0], "ahead": min(ahead)}


def _rows(name: str, n: int, k: int) -> registered.Loss:
    """The loss of each row, [B]; one row at a time where the loss knows no ``reduction="none"``."""
    loss = registered.build(name, class_counts=[100] * n, k=k, reduction="none")

    def rows(s: Tensor, y: Tensor) -> Tensor:
        values = loss(s, y)
        if values.shape == y.shape:
            return values
        return torch.stack([loss(s[i : i + 1], y[i : i + 1]) for i in range(len(y))])

    return rows


def _starts(p: Tensor, count: int) -> Tensor:
    """Scores to start from [count, n]: log p, and random ones."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(count - 1, len(p), generator=generator, dtype=torch.float64)
    return torch.cat([(p.log() - p.log().mean())[None], random])


def _minima(risk: Callable[[Tensor], Tensor], basis: Tensor, starts: Tensor) -> list[tuple[float, float, Tensor]]:
    """(risk, the gradient's largest entry, scores) that BFGS ends at from each start, the least risk first.

    The scores are ``basis @ z``. At the minimum of a loss with kinks the gradient does not vanish.
    """
    from scipy.optimize import minimize

    def value(z: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        leaf = torch.from_numpy(z).requires_grad_()
        risk_at_z = risk((basis @ leaf)[None])
        (slope,) = torch.autograd.grad(risk_at_z, leaf)
        return float(risk_at_z.detach()), slope.numpy()

    options = {"gtol": FLAT, "maxiter": STEPS}
    runs = [minimize(value, start.numpy(), jac=True, method="BFGS", options=options) for start in starts]
    minima = [(float(one.fun), float(np.abs(one.jac).max()), basis @ torch.from_numpy(one.x)) for one in runs]
    return sorted(minima, key=lambda one: one[0])


def _sparsity(c: Configuration) -> dict[str, Any]:
    """Count the scores of a row that have a gradient, and those that carry most of it, on average over rows."""
    s = torch.randn(c["B"], c["n"], dtype=torch.float64).requires_grad_()
    loss = _rows(c["loss"], c["n"], c["k"])(s, torch.randint(c["n"], (c["B"],)))
    size = torch.autograd.grad(loss.sum(), s)[0].abs()
    size = size[size.sum(-1) > 0]
    share = size.sort(-1, descending=True).values.cumsum(-1) / size.sum(-1, keepdim=True)
    return {
        "nonzero": float((size > 0).sum(-1).double().mean()),
        "most": float((share < c["share"]).sum(-1).add(1).double().mean()),
    }


def _limit(c: Configuration) -> dict[str, Any]:
    """How far the smooth top-k SVM is from the hinge that it smooths, and how far it may be: tau log C(n, k)."""
    n, k, tau = c["n"], c["k"], c["tau"]
    s, y = torch.randn(c["B"], n, dtype=torch.float64), torch.randint(n, (c["B"],))
    smooth = registered.build("smooth_topk_svm", class_counts=[1] * n, k=k, tau=tau, reduction="none")(s, y)
    return {"difference": float((smooth - _hinge(s, y, k)).abs().max()), "bound": tau * math.log(math.comb(n, k))}


def _hinge(s: Tensor, y: Tensor, k: int) -> Tensor:
    """Berrada's equation 5: the best k-set, 1 ahead where it lacks the label, less the best k-set with the label."""
    own = s.gather(1, y[:, None])[:, 0]
    rest = s.scatter(1, y[:, None], -math.inf).topk(k, -1).values
    with_label = (rest[:, : k - 1].sum(-1) + own) / k
    return torch.maximum(1.0 + rest.sum(-1) / k, with_label) - with_label


def _bound(c: Configuration) -> dict[str, Any]:
    """By how much ``spherical_bound`` exceeds the cross-entropy that it bounds."""
    n = c["n"]
    s, y = c["scale"] * torch.randn(c["B"], n, dtype=torch.float64), torch.randint(n, (c["B"],))
    bound = registered.build("spherical_bound", class_counts=[1] * n, reduction="none")(s, y)
    gap = bound - torch.nn.functional.cross_entropy(s, y, reduction="none")
    return {"least": float(gap.min()), "mean": float(gap.mean()), "greatest": float(gap.max())}


def _ceiling(c: Configuration) -> dict[str, Any]:
    """The sum over classes of the largest probability that any features give them, for a random linear layer.

    With g = (h, 1), a weight (w_y h + shift)^2 + epsilon is g' A_y g, and the sum of all weights g' M g. The largest
    quotient is the largest eigenvalue of A_y against M, of rank 2; its eigenvector gives features that reach it. All
    eigenvalues of all classes sum to the trace of M^-1 M, which is d + 1.
    """
    n, d = c["n"], c["d"]
    loss: Any = registered.build(c["loss"], class_counts=[1] * n, reduction="none")
    weight = torch.randn(n, d, dtype=torch.float64) / math.sqrt(d)
    one = torch.ones(n, 1, dtype=torch.float64)
    linear = torch.cat([weight, loss.shift * one], 1)
    constant = torch.cat([torch.zeros_like(weight), math.sqrt(loss.epsilon) * one], 1)
    both = torch.stack([linear, constant], 1)  # [n, 2, d + 1]: A_y = both[y]' both[y]
    inverse = torch.linalg.inv(torch.einsum("yri,yrj->ij", both, both))
    largest, turned = torch.linalg.eigh(both @ inverse @ both.mT)
    g = torch.einsum("ij,yrj,yr->yi", inverse, both, turned[:, :, -1])
    # where the last entry is 0 the supremum lies at infinity, and FAR is near enough
    last, nearest = g[:, d:], g[:, :d].abs().amax(-1, keepdim=True) / FAR
    last = torch.where(last.abs() < nearest, nearest, last)
    reached = torch.exp(-loss(g[:, :d] / last @ weight.T, torch.arange(n)))
    return {"sum": float(largest[:, -1].sum()), "reached": float(reached.sum())}
