"""Rows of the softmax family on GPUs."""
