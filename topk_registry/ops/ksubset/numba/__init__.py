"""The k-subset operator on the CPU, compiled by numba."""
