"""The checks behind ``topk_registry.testing``, by what they look at; each is a function of a subject."""

from topk_registry.testing import calls, gradients, options, precision, rows, state, targets, transforms
from topk_registry.testing.expect import Check

CHECKS: dict[str, Check] = {
    check.__name__: check
    for module in (calls, targets, gradients, precision, rows, options, state, transforms)
    for check in module.CHECKS
}
