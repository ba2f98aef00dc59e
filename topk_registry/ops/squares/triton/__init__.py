"""Rows of the losses of sums of squares on GPUs."""
