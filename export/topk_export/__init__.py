"""Export of trained classifiers to ONNX, and inference on the exported files.

``export_onnx`` needs torch, timm and onnx; ``Predictor`` needs numpy, onnxruntime and Pillow. Both resolve on first
use, so that a machine which only predicts installs only what predicting takes.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topk_export.calibration.check_nodes import check_score_nodes
    from topk_export.conversion.to_onnx import export_onnx
    from topk_export.errors import DeviceError, ExportError, ImageError, ModelFileError, PredictionError
    from topk_export.runtime.predictor import Predictor
    from topk_export.runtime.ranking import Prediction
    from topk_export.runtime.several import LabelPrediction
    from topk_export.scoring.columns import Column, check_column
    from topk_export.verification.verify import verify

_HOMES = {
    "Column": "scoring.columns",
    "DeviceError": "errors",
    "ExportError": "errors",
    "ImageError": "errors",
    "LabelPrediction": "runtime.several",
    "ModelFileError": "errors",
    "Prediction": "runtime.ranking",
    "PredictionError": "errors",
    "Predictor": "runtime.predictor",
    "check_column": "scoring.columns",
    "check_score_nodes": "calibration.check_nodes",
    "export_onnx": "conversion.to_onnx",
    "verify": "verification.verify",
}

__all__ = [
    "Column",
    "DeviceError",
    "ExportError",
    "ImageError",
    "LabelPrediction",
    "ModelFileError",
    "Prediction",
    "PredictionError",
    "Predictor",
    "check_column",
    "check_score_nodes",
    "export_onnx",
    "verify",
]


if not TYPE_CHECKING:  # which would take any name for one that exists

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"topk_export.{_HOMES[name]}"), name)
        close = get_close_matches(name, __all__, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise AttributeError(f"module 'topk_export' has no attribute {name!r}; {hint}it has {', '.join(__all__)}")

    def __dir__() -> list[str]:
        return __all__
