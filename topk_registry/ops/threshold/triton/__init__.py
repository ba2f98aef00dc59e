"""Rows of the sigmoid family on GPUs."""
