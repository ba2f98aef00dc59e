"""Data sets of the studies, registered as ``topk/NAME``."""
