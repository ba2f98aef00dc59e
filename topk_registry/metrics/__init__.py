"""Metrics: top-k accuracy and its averages, several labels, gradient sparsity, calibration of marginals."""

from topk_registry.metrics.accuracy import GradientSparsity, TopKAccuracy
from topk_registry.metrics.calibration import MarginalCalibration
from topk_registry.metrics.label_sets import LabelSetMetrics, average_precision
from topk_registry.metrics.sets import SetCoverage
from topk_registry.metrics.streaming import StreamingMetric

__all__ = [
    "GradientSparsity",
    "LabelSetMetrics",
    "MarginalCalibration",
    "SetCoverage",
    "StreamingMetric",
    "TopKAccuracy",
    "average_precision",
]
