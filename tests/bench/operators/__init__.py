"""The operators that can be benchmarked, by name, and the cases of each on a GPU."""

from collections.abc import Iterator, Mapping
from itertools import product

from tests.bench.operators import ksubset, losses, perturbed
from topk_studies.timing.contest import CONDITIONS, Operator

OPERATORS = {operator.name: operator for operator in (ksubset.OPERATOR, losses.OPERATOR, perturbed.OPERATOR)}
GPU_SHAPES = ((8192, 1000, 5), (1024, 21_841, 5), (32, 100_000, 5), (256, 1000, 50))


def gpu_options(operator: Operator) -> Iterator[Mapping[str, float]]:
    """Options of the cases on a GPU: on class indices and distributions, with and without a CUDA graph.

    Caches are cold, as the rest of a training step leaves them.
    """
    of_losses = [{name: x for name, x in each.items() if name not in CONDITIONS} for each in operator.options]
    different = {tuple(each.items()): each for each in of_losses}.values()
    for own, mixup, graph in product(different, (0.0, 0.3), (0.0, 1.0)):
        yield {**own, "mixup": mixup, "cold": 1.0, "graph": graph}
