"""Row kernels on the CPU, compiled by numba."""
