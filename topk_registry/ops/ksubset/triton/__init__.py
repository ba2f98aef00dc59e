"""Triton kernels of the k-subset operator, for GPUs."""
