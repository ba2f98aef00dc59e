"""The kernel for the CPU, compiled by numba."""
