"""Operators: one folder each, with its definition, its torch path, its kernels and its autograd."""
