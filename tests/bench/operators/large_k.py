"""Losses of a soft top-k at small and large k: what grows with k, and what does not."""

from dataclasses import replace
from itertools import product

from tests.bench.operators import losses

NAMES = ("soft_topk", "lapsum", "smooth_topk_svm")

OPERATOR = replace(
    losses.OPERATOR,
    name="large_k",
    summary=f"{', '.join(NAMES)} at k = 5, 50 and 500, on class indices",
    contestants=lambda peer_path: [
        one for one in losses.contestants(peer_path) if one.name in (losses.CROSS_ENTROPY, *NAMES)
    ],
    options=({"smoothing": 0.0, "mixup": 0.0, "cold": 0.0},),
    shapes=tuple((B, n, k) for B, n, k in product((64, 256), (1000, 10_000), (5, 50, 500))),
    tests=("tests/plugins/test_gupta.py", "tests/plugins/test_lapsum.py", "tests/ops/threshold"),
)
