"""Data sets of the studies. Each data set is registered under the name ``topk/NAME``."""
