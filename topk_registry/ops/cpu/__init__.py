"""Numerics, memory and threads for kernels compiled by numba; no loss."""
