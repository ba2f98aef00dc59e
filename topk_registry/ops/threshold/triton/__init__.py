"""Rows of sigmoids with one threshold, on GPUs."""
