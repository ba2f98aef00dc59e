"""Arithmetic, memory and threads for numba kernels. These modules do not depend on any loss."""
