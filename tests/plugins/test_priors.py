"""Logit adjustment, balanced softmax and generalised cross-entropy: class counts, and the limit of a small q."""

import torch
from torch.nn import functional as F

from tests.plugins.rows import batch
from topk_registry import create_loss

COUNTS = [50, 20, 5, 1, 0]
COUNTED = torch.tensor([50, 20, 5, 1, 1], dtype=torch.float64)  # a class without samples as the rarest with some


def test_balanced_softmax_counts_classes_as_often_as_they_were_seen():
    s, y = batch(5)
    loss = create_loss("balanced_softmax", class_counts=COUNTS)(s, y)
    seen = torch.cat([s[:, [c]].expand(-1, int(count)) for c, count in enumerate(COUNTED)], 1)
    wanted = (seen.logsumexp(-1) - (s + COUNTED.log()).gather(1, y[:, None])[:, 0]).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, create_loss("logit_adjustment", class_counts=COUNTS)(s, y))


def test_counts_are_no_state():
    """A checkpoint loads whatever the counts are."""
    assert not create_loss("logit_adjustment", class_counts=COUNTS).state_dict()


def test_generalised_cross_entropy_with_a_small_q_is_cross_entropy():
    s, y = batch(5)
    near = create_loss("generalised_cross_entropy", q=1e-12)(s, y)
    torch.testing.assert_close(near, F.cross_entropy(s, y))
