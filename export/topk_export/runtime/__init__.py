"""Prediction of images with an exported ONNX file. This package needs numpy, onnxruntime and Pillow."""
