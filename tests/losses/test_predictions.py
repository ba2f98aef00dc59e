"""``predictive_logits``: the softmax of these logits is the distribution that a loss fits."""

import math

import pytest
import torch

from topk_registry import TopKHead, create_loss
from topk_registry.nn.classifier import CosineClassifier


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [
        ("focal", {"gamma": 0.0}, 1.0),
        ("ldam", {"class_counts": [9, 3, 1, 1], "max_margin": 0.0}, 1.0),
        ("ldr_kl", {"temperature": 3.0, "gap": 0.0}, 3.0),
        ("ksubset_nll", {"temperature": 3.0}, 1.0),
        ("log_spherical_softmax", {"epsilon": 0.3}, 1.0),
        ("log_taylor_softmax", {}, 1.0),
    ],
)
def test_without_a_margin_the_loss_is_the_log_likelihood_of_its_predictions(name, options, factor):
    """Up to a factor, and a constant that does not depend on the logits."""
    s = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = create_loss(name, reduction="none", **options)
    y = torch.tensor([0, 1, 2, 3, 1, 0])
    likelihood = loss.predictive_logits(s).log_softmax(-1).gather(1, y[:, None])[:, 0]
    difference = loss(s, y) + factor * likelihood
    torch.testing.assert_close(difference, difference[:1].expand(6))


def test_the_temperature_of_aldr_kl_where_every_sample_has_the_same_temperature():
    """For a large alpha, the temperature of each sample is lambda_0."""
    s = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.tensor([0, 1, 2, 3, 1])
    loss = create_loss("aldr_kl", temperature=3.0, gap=0.0, alpha=1e12, reduction="sum")
    (gradient,) = torch.autograd.grad(loss(s, y), s)
    expected = loss.predictive_logits(s).softmax(-1) - torch.nn.functional.one_hot(y, 4)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9)


def test_ldam_on_a_cosine_classifier_is_certain_of_a_perfect_prediction():
    n = 100
    classifier = CosineClassifier(n, n)
    with torch.no_grad():
        classifier.weight.copy_(torch.eye(n))
    cosines = classifier(torch.eye(n)).detach()
    loss = create_loss("ldam", class_counts=[5] * n)
    p = loss.predictive_logits(cosines).softmax(-1).diagonal()
    assert p.min() > 0.999
    assert cosines.softmax(-1).diagonal().max().item() == pytest.approx(math.e / (math.e + n - 1))  # 2.7 %


def test_only_losses_of_marginals_have_a_marginal_temperature():
    assert create_loss("smooth_topk_svm", k=[2, 4], tau=0.5).marginal_temperature == 2.0
    assert create_loss("ldr_kl", temperature=3.0).marginal_temperature is None
    assert create_loss("ksubset_nll", temperature=3.0).marginal_temperature is None
    assert TopKHead.of_loss(create_loss("topk_nll", k=3, tau=0.1)).temperature == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["log_spherical_softmax", "log_taylor_softmax"])
def test_spherical_losses_exclude_classes_as_their_documentation_says(name):
    s = torch.tensor([[0.5, 3.0, -1.0]], requires_grad=True)
    loss = create_loss(name)
    assert "predictive_logits(logits).masked_fill(mask" in " ".join(type(loss).__doc__.split())
    mask = torch.tensor([[False, True, False]])
    p = loss.predictive_logits(s).masked_fill(mask, -torch.inf).softmax(-1)
    weight = loss.predictive_logits(s).exp()
    torch.testing.assert_close(p, torch.where(mask, 0.0, weight / weight[:, [0, 2]].sum()))
    (gradient,) = torch.autograd.grad(p[0, 0].log(), s)
    assert gradient.isfinite().all()
