"""From a torch module to an ONNX file. Needs torch."""
