"""What is peculiar to LapSum: few scores, and a threshold that is a score."""

import pytest
import torch

from tests.ops.cpu_rows import both
from topk_registry import use_backend
from topk_registry.rows import lapsum_rows, sparse_topk_rows

pytest.importorskip("numba")


def test_too_few_scores_are_not_ruled_out():
    s = torch.full((1, 9), -torch.inf)
    s[0, :2] = 0.0
    for loss in (lapsum_rows(3), sparse_topk_rows(3)):
        value, gradient = both(loss, s, torch.tensor([0]))
        assert value.isnan().all()
        assert gradient.isnan().all()


def test_the_threshold_of_lapsum_at_a_score():
    """Of equal scores half are chosen, by a threshold that equals them: every class has a part in the gradient."""
    s, y = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0])
    wanted = torch.tensor([[-0.75, 0.25, 0.25, 0.25]], dtype=torch.float64)
    for name in ("numba", "torch"):
        with use_backend(name):
            torch.testing.assert_close(both(lapsum_rows(2), s, y)[1], wanted)
