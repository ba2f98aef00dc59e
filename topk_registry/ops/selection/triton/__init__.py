"""Rows of the top-k hinges on GPUs."""
