"""Arithmetic, tiles and memory layout for Triton kernels. These modules do not depend on any loss."""
