"""Export of trained classifiers to ONNX, and inference on the exported files."""
