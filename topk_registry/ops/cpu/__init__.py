"""Numerics, memory and threads for numba kernels, independent of any loss."""
