"""The algorithms of Berrada, Zisserman and Kumar (2018) as published: baselines for Tables 3 to 5 of the paper."""

from topk_registry.studies.published.algorithm2 import LogSigmas, default_order
from topk_registry.studies.published.divide_conquer import divide_and_conquer
from topk_registry.studies.published.loss import ALGORITHMS, smooth_topk_svm
from topk_registry.studies.published.semiring import LINEAR, LOG
from topk_registry.studies.published.summation import summation

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
