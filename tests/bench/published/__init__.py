"""The algorithms of Berrada, Zisserman and Kumar (2018) as published: baselines for Tables 3 to 5 of the paper."""

from tests.bench.published.algorithm2 import LogSigmas, default_order
from tests.bench.published.divide_conquer import divide_and_conquer
from tests.bench.published.loss import ALGORITHMS, smooth_topk_svm
from tests.bench.published.semiring import LINEAR, LOG
from tests.bench.published.summation import summation

__all__ = [
    "ALGORITHMS",
    "LINEAR",
    "LOG",
    "LogSigmas",
    "default_order",
    "divide_and_conquer",
    "smooth_topk_svm",
    "summation",
]
