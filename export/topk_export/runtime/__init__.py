"""Prediction of the classes of images with an exported ONNX file, by numpy, onnxruntime and Pillow."""
