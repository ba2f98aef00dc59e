"""What is peculiar to sparse masks: that many classes may be inside."""

import pytest
import torch

from tests.ops.cpu_rows import N, both, scores, targets
from topk_registry import use_backend
from topk_registry.rows import sparse_topk_rows

pytest.importorskip("numba")


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0])
@pytest.mark.parametrize("k", [2, 60, N - 1])
def test_sparse_masks_that_hold_many_classes(k, scale):
    """Each class inside has a threshold of its own, all of them from one pass; masks add up to k, and are as exact."""
    s, loss = scale * scores("gaussian"), sparse_topk_rows(k, tau=1.5)
    s[0] = 0.0
    s[1, :9] = s[1, 9:18]
    q = targets(s)[1]
    found = both(loss, s, q)
    with use_backend("torch"):
        wanted = both(loss, s, q)
    tolerance = 8 * k * torch.finfo(torch.float64).eps
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=tolerance)
