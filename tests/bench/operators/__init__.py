"""The operators that can be benchmarked, by name."""

from tests.bench.operators import ksubset, perturbed

OPERATORS = {operator.name: operator for operator in (ksubset.OPERATOR, perturbed.OPERATOR)}
