"""The checks behind ``topk_registry.testing``, by what they look at; each is a function of a subject.

The first ones are about words: the type, the precision and the shape of what comes, that it repeats, and how rows are
reduced and weighted. Numbers are compared after them.
"""

from topk_registry.testing import calls, gradients, options, precision, rows, state, tables, targets, transforms
from topk_registry.testing.expect import Check

FIRST = (
    calls.returns_differentiable_scalar,
    calls.keeps_the_precision,
    calls.repeats_under_a_seed,
    options.reduction_is_consistent,
    options.weight_scales_rows,
)
CHECKS: dict[str, Check] = {check.__name__: check for check in FIRST}
CHECKS |= {
    check.__name__: check
    for module in (calls, targets, tables, gradients, precision, rows, options, state, transforms)
    for check in module.CHECKS
}
