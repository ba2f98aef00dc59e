"""The check of masses, without which a kernel could read beyond the end of a tensor."""

import pytest
import torch

from topk_registry.functional import perturbed_hinge, smooth_topk
from topk_registry.ops.masses import Masses

B, N = 4, 9
SHAPES = {  # labels, shares, even, dense
    "no mass": (None, None, None, None),
    "labels without shares": ((B, 1), None, None, None),
    "more labels than shares": ((B, 2), (B, 1), None, None),
    "one row of labels": ((1, 1), (1, 1), None, None),
    "labels of one dimension": ((B,), (B,), None, None),
    "one even mass": ((B, 1), (B, 1), (1,), None),
    "even masses alone": (None, None, (B,), None),
    "a dense row": (None, None, None, (1, N)),
    "dense masses and labels": ((B, 1), (B, 1), None, (B, N)),
    "dense and even masses": (None, None, (B,), (B, N)),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("operator", [smooth_topk, perturbed_hinge])
def test_masses_of_wrong_shapes_are_refused(operator, kind):
    labels, *masses = SHAPES[kind]
    parts = Masses(
        None if labels is None else torch.zeros(labels, dtype=torch.int64),
        *(None if shape is None else torch.ones(shape) for shape in masses),
    )
    with pytest.raises(ValueError, match="masses must be"):
        operator(torch.zeros(B, N), parts, k=3)
