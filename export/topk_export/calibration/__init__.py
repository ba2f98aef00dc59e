"""Calibration of an exported file: thresholds from held-out data, written into its graph, and a report."""
