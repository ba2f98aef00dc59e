"""Kernels of the smooth top-k loss on the CPU, compiled by numba."""
