"""The hinge family against its formulas, written out in Python over sorted lists."""

import math

import pytest
import torch
from torch import Tensor

from topk_plugins.topk_hinge import TopKHinge, TopKHingeCalibrated, TopKHingeConvex, TopKSVM

LOSSES = [TopKSVM, TopKHinge, TopKHingeConvex, TopKHingeCalibrated]
SIZES = [(2, 1), (6, 2), (11, 5)]
ALPHA = 0.75


def rivals(s: list[float], y: int) -> list[float]:
    return sorted((score for c, score in enumerate(s) if c != y), reverse=True)


def top_k_svm(s: list[float], y: int, k: int) -> float:
    return max((rivals(s, y)[k - 1] - s[y]) / k + ALPHA, 0)


def top_k_hinge(s: list[float], y: int, k: int) -> float:
    return max(1 + rivals(s, y)[k - 1] - s[y], 0)


def top_k_hinge_convex(s: list[float], y: int, k: int) -> float:
    raised = sorted((score + (c != y) for c, score in enumerate(s)), reverse=True)
    return max(sum(raised[:k]) / k - s[y], 0)


def top_k_hinge_calibrated(s: list[float], y: int, k: int) -> float:
    return max(1 + sorted(s, reverse=True)[k] - s[y], 0)


FORMULAS = {
    TopKSVM: top_k_svm,
    TopKHinge: top_k_hinge,
    TopKHingeConvex: top_k_hinge_convex,
    TopKHingeCalibrated: top_k_hinge_calibrated,
}


def build(loss: type, k: int, **options):
    return loss(k, **({"alpha": ALPHA, **options} if loss is TopKSVM else options))


def table(loss: type, logits: Tensor, k: int) -> Tensor:
    """L(s, c) for every class by the formula [B, n]."""
    rows = [[FORMULAS[loss](row, c, k) for c in range(len(row))] for row in logits.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def scores(kind: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    generic = 2 * torch.randn(8, n, generator=generator, dtype=torch.float64)
    return {
        "generic": generic,
        "tied": generic.round(),
        "flat": torch.full((8, n), 0.3, dtype=torch.float64),
        "wide": 1e4 * generic,
        "one far out": generic + 50 * torch.eye(n, dtype=torch.float64)[torch.arange(8) % n],
    }[kind]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("kind", ["generic", "tied", "flat", "wide", "one far out"])
def test_every_path_is_the_formula(loss, n, k, kind):
    logits = scores(kind, n)
    wanted = table(loss, logits, k)
    close = {"rtol": 1e-13, "atol": 1e-13 * float(logits.abs().max())}
    torch.testing.assert_close(build(loss, k).per_class(logits), wanted, **close)
    for y in range(n):
        labels = torch.full((8,), y)
        torch.testing.assert_close(build(loss, k, reduction="none")(logits, labels), wanted[:, y], **close)
    q = scores("generic", n).softmax(-1)
    torch.testing.assert_close(build(loss, k, reduction="none")(logits, q), (q * wanted).sum(-1), **close)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_of_tied_rivals_one_alone_is_pushed_and_k_by_the_convex_hinge(loss, dense):
    """All rivals tie with the label: of the n - 1 at the threshold exactly one takes the gradient, or k a part each."""
    size = 1 / 3 if loss is TopKSVM else 1.0
    shares = [1 / 3, 1 / 3, 1 / 3, 0, 0] if loss is TopKHingeConvex else [size, 0, 0, 0, 0]
    for label in range(6):
        logits = scores("flat", 6)[:1].requires_grad_()
        target = torch.eye(6, dtype=torch.float64)[[label]] if dense else torch.tensor([label])
        (gradient,) = torch.autograd.grad(build(loss, 3)(logits, target), logits)
        pushed = gradient[0, torch.arange(6) != label].sort(descending=True).values
        if gradient.any():  # the calibrated hinge may choose the label as its own threshold
            torch.testing.assert_close(gradient[0, label].item(), -size)
            assert pushed.tolist() == pytest.approx(shares)
        else:
            assert loss is TopKHingeCalibrated


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_index_and_one_hot_targets_agree_on_ties(loss):
    logits = scores("tied", 11)
    labels = torch.arange(8)
    gradients = []
    for target in (labels, torch.eye(11, dtype=torch.float64)[labels]):
        leaf = logits.clone().requires_grad_()
        gradients.append(torch.autograd.grad(build(loss, 4)(leaf, target), leaf)[0])
    for gradient in gradients:
        torch.testing.assert_close(gradient.sum(1), torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(gradients[0].norm(dim=1), gradients[1].norm(dim=1))


def test_the_convex_hinge_bounds_top_k_error():
    logits, labels = scores("generic", 11), torch.arange(8)
    error = (logits.topk(5).indices != labels[:, None]).all(1)
    assert (TopKHingeConvex(5, reduction="none")(logits, labels) >= error.double()).all()
    assert (TopKHinge(5, reduction="none")(logits, labels) >= error.double()).all()


def test_a_margin_for_each_class():
    logits, labels, alpha = scores("generic", 6), torch.arange(8) % 6, torch.linspace(0, 2, 6)
    single = torch.stack([TopKSVM(2, alpha=a, reduction="none")(logits, labels) for a in alpha.tolist()], dim=1)
    loss = TopKSVM(2, alpha=alpha, reduction="none")
    wanted = single.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(loss(logits, labels), wanted, rtol=1e-6, atol=1e-6)  # margins are kept in float32
    one_hot = torch.eye(6, dtype=torch.float64)[labels]
    torch.testing.assert_close(loss(logits, one_hot), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(loss.state_dict()["alpha"], alpha)
    with pytest.raises(ValueError, match="alpha has 6 entries, logits have 5 classes"):
        loss(logits[:, :5], labels % 5)


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf, [1.0, -0.5], [[1.0]]])
def test_bad_margins(alpha):
    with pytest.raises(ValueError, match="alpha"):
        TopKSVM(alpha=alpha)
