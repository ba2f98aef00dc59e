"""The operators that can be benchmarked, by name."""

from tests.bench.operators import ksubset, losses, perturbed

OPERATORS = {operator.name: operator for operator in (ksubset.OPERATOR, losses.OPERATOR, perturbed.OPERATOR)}
