"""Metrics of the papers: top-k accuracy and its averages, gradient sparsity, calibration of marginals."""

from topk_registry.metrics.accuracy import GradientSparsity, TopKAccuracy
from topk_registry.metrics.calibration import MarginalCalibration
from topk_registry.metrics.sets import SetCoverage
from topk_registry.metrics.streaming import StreamingMetric

__all__ = ["GradientSparsity", "MarginalCalibration", "SetCoverage", "StreamingMetric", "TopKAccuracy"]
