"""HTTP service of an exported ONNX file."""
