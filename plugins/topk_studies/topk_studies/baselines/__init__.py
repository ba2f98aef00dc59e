"""Algorithms of Berrada, Zisserman and Kumar (2018) for the smooth top-k SVM loss, as baselines for measurements."""

from topk_studies.baselines.algorithm2 import LogSigmas, default_order
from topk_studies.baselines.divide_conquer import divide_and_conquer
from topk_studies.baselines.loss import ALGORITHMS, smooth_topk_svm
from topk_studies.baselines.semiring import LINEAR, LOG
from topk_studies.baselines.summation import summation

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
