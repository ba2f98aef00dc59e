"""Console output and curves of a run."""
