"""Arithmetic, tiles and memory layout for Triton kernels, independent of any loss."""
