"""Checks and timing of an exported file. Needs onnx and onnxruntime, not torch."""
