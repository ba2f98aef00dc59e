"""A GPU's turn: everything about the kernels that only a GPU can say, tested and measured in parts of a few minutes."""
