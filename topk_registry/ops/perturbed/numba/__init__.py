"""The perturbed top-k operator on the CPU, compiled by numba."""
