"""Metrics that are updated batch by batch: top-k accuracy, multi-label metrics, and calibration errors."""

from topk_registry.metrics.accuracy import TopKAccuracy
from topk_registry.metrics.calibration import ExpectedCalibrationError, MarginalCalibration
from topk_registry.metrics.label_sets import LabelSetMetrics, average_precision
from topk_registry.metrics.streaming import StreamingMetric

__all__ = [
    "ExpectedCalibrationError", "LabelSetMetrics", "MarginalCalibration", "StreamingMetric", "TopKAccuracy",
    "average_precision",
]  # fmt: skip
