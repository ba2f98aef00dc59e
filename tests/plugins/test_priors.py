"""Logit adjustment, balanced softmax and generalised cross-entropy: against their formulas, and what they are told."""

import pytest
import torch
from torch.nn import functional as F

from tests.plugins.rows import batch, mixtures, softmax
from topk_registry import create_loss

COUNTS = [50, 20, 5, 1, 0]
COUNTED = torch.tensor([50, 20, 5, 1, 1], dtype=torch.float64)  # a class without samples as the rarest with some
pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("tau", [0.0, 1.0, 1.7])
def test_logit_adjustment_is_the_papers_formula(tau):
    s, y = batch(5)
    prior = COUNTED / COUNTED.sum()
    weighted = prior**tau * s.exp()
    wanted = -(weighted / weighted.sum(-1, keepdim=True)).log()
    loss = create_loss("logit_adjustment", class_counts=COUNTS, tau=tau, reduction="none")
    # the shift is held in single precision
    torch.testing.assert_close(loss(s, y), wanted.gather(1, y[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    q = mixtures(5)
    torch.testing.assert_close(loss(s, q), (q * wanted).sum(-1), rtol=1e-6, atol=1e-6)


def test_balanced_softmax_counts_classes_as_often_as_they_were_seen():
    s, y = batch(5)
    loss = create_loss("balanced_softmax", class_counts=COUNTS)(s, y)
    seen = torch.cat([s[:, [c]].expand(-1, int(count)) for c, count in enumerate(COUNTED)], 1)
    wanted = (seen.logsumexp(-1) - (s + COUNTED.log()).gather(1, y[:, None])[:, 0]).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, create_loss("logit_adjustment", class_counts=COUNTS)(s, y))


def test_equal_counts_are_cross_entropy():
    s, y = batch(5)
    torch.testing.assert_close(create_loss("balanced_softmax", class_counts=[7] * 5)(s, y), F.cross_entropy(s, y))


def test_counts_are_no_state():
    """A checkpoint loads whatever the counts are."""
    assert not create_loss("logit_adjustment", class_counts=COUNTS).state_dict()


@pytest.mark.parametrize("q", [1e-6, 0.3, 0.7, 1.0])
def test_generalised_cross_entropy_is_the_papers_formula(q):
    s, y = batch(5)
    wanted = [(1 - softmax(row)[label] ** q) / q for row, label in zip(s.tolist(), y.tolist(), strict=True)]
    found = create_loss("generalised_cross_entropy", q=q, reduction="none")(s, y)
    rtol = max(1e-12, 1e-15 / q)  # the formula as it is written cancels for small q
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=rtol, atol=1e-12)


def test_generalised_cross_entropy_lies_between_two_others():
    s, y = batch(5)
    near = create_loss("generalised_cross_entropy", q=1e-12)(s, y)
    torch.testing.assert_close(near, F.cross_entropy(s, y))
    p = s.softmax(-1)
    absolute = (p - F.one_hot(y, 5)).abs().sum(-1).mean() / 2
    torch.testing.assert_close(create_loss("generalised_cross_entropy", q=1.0)(s, y), absolute)


def test_gradients():
    s, y = batch(5)
    for loss in (
        create_loss("generalised_cross_entropy"),
        create_loss("logit_adjustment", class_counts=COUNTS, label_smoothing=0.1),
    ):
        assert torch.autograd.gradcheck(lambda s, loss=loss: loss(s, y), s)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("logit_adjustment", {}, "class_counts is required"),
        (
            "logit_adjustment",
            {"class_counts": [1, -1]},
            "class_counts must be a list of finite numbers of at least 0, one a class",
        ),
        ("logit_adjustment", {"class_counts": [1, 1], "tau": -1}, "tau must be a finite number of at least 0, got -1"),
        ("generalised_cross_entropy", {"q": 0}, "q must be a finite number above 0 and at most 1, got 0"),
        ("generalised_cross_entropy", {"q": 1.5}, "q must be a finite number above 0 and at most 1, got 1.5"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_loss(name, **options)


def test_counts_of_another_number_of_classes():
    s, y = batch(5)
    with pytest.raises(ValueError, match="class_counts has 2 entries, logits have 5 classes"):
        create_loss("balanced_softmax", class_counts=[1, 2])(s, y)
