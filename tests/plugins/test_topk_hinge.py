"""The hinge family: ties, and a margin per class."""

import pytest
import torch
from torch import Tensor

from topk_plugins.topk_hinge import TopKHinge, TopKHingeCalibrated, TopKHingeConvex, TopKSVM

LOSSES = [TopKSVM, TopKHinge, TopKHingeConvex, TopKHingeCalibrated]
ALPHA = 0.75


def build(loss: type, k: int, **options):
    return loss(k, **({"alpha": ALPHA, **options} if loss is TopKSVM else options))


def scores(kind: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    generic = 2 * torch.randn(8, n, generator=generator, dtype=torch.float64)
    return {
        "generic": generic,
        "tied": generic.round(),
        "flat": torch.full((8, n), 0.3, dtype=torch.float64),
    }[kind]


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


def test_a_margin_for_each_class():
    logits = scores("generic", 6)
    labels = torch.arange(8) % 6
    alpha = torch.linspace(0, 2, 6)
    single = torch.stack([TopKSVM(2, alpha=a, reduction="none")(logits, labels) for a in alpha.tolist()], dim=1)
    loss = TopKSVM(2, alpha=alpha, reduction="none")
    wanted = single.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(loss(logits, labels), wanted, rtol=1e-6, atol=1e-6)  # margins are kept in float32
    one_hot = torch.eye(6, dtype=torch.float64)[labels]
    torch.testing.assert_close(loss(logits, one_hot), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(loss.state_dict()["alpha"], alpha)
