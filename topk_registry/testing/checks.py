"""The checks behind ``topk_registry.testing``, by what they look at; each is a function of a subject."""

from topk_registry.testing import calls
from topk_registry.testing import gradients
from topk_registry.testing import options
from topk_registry.testing import precision
from topk_registry.testing import rows
from topk_registry.testing import state
from topk_registry.testing import targets
from topk_registry.testing.expect import Check

CHECKS: dict[str, Check] = {
    check.__name__: check
    for module in (calls, targets, gradients, precision, rows, options, state)
    for check in module.CHECKS
}
