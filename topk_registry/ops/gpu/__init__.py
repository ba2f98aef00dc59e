"""Arithmetic, tiles and layout for Triton kernels; no loss."""
