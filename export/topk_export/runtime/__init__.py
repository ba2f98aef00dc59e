"""Prediction from an exported file with numpy, onnxruntime and Pillow."""
