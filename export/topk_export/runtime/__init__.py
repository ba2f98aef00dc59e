"""Prediction of the classes of images with an exported ONNX file. This subpackage does not need torch."""
