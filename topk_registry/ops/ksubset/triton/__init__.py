"""The k-subset operator on GPUs, in Triton."""
