"""Export of trained classifiers to ONNX files, and prediction of the classes of images with these files.

``export_onnx`` needs the packages torch, timm and onnx. ``Predictor`` needs numpy, onnxruntime and Pillow. Importing
``topk_export`` imports none of these packages. The first use of a public name imports the packages that this name
needs.
"""

from typing import TYPE_CHECKING

from topk_registry.lazy import lazy_names

if TYPE_CHECKING:
    from topk_export.errors import DeviceError as DeviceError
    from topk_export.errors import ExportError as ExportError
    from topk_export.errors import ImageError as ImageError
    from topk_export.errors import ModelFileError as ModelFileError
    from topk_export.errors import PredictionError as PredictionError
    from topk_export.export import export_onnx as export_onnx
    from topk_export.foreign import attach as attach
    from topk_export.runtime.predictor import Predictor as Predictor
    from topk_export.runtime.ranking import ClassScore as ClassScore
    from topk_export.runtime.ranking import Prediction as Prediction
    from topk_export.source import load_source as load_source
    from topk_export.verify import verify_file as verify_file

__all__ = [
    "ClassScore", "DeviceError", "ExportError", "ImageError", "ModelFileError", "Prediction", "PredictionError",
    "Predictor", "attach", "export_onnx", "load_source", "verify_file",
]  # fmt: skip

_MODULES = {
    "ClassScore": "runtime.ranking",
    "DeviceError": "errors",
    "ExportError": "errors",
    "ImageError": "errors",
    "ModelFileError": "errors",
    "Prediction": "runtime.ranking",
    "PredictionError": "errors",
    "Predictor": "runtime.predictor",
    "attach": "foreign",
    "export_onnx": "export",
    "load_source": "source",
    "verify_file": "verify",
}

if not TYPE_CHECKING:  # if a type checker saw __getattr__, it would accept every name
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
