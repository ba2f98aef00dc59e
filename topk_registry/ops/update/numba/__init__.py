"""The step on the CPU, compiled by numba."""
