"""How the kernel is compiled."""

from numba import njit

compiled = njit(error_model="numpy", fastmath={"contract"})  # products may be fused with sums
inlined = njit(error_model="numpy", fastmath={"contract"}, forceinline=True)  # or loops around it are not vectors
summing = njit(error_model="numpy", fastmath={"contract", "reassoc"})  # and long sums be reordered
