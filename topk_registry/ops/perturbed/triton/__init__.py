"""The perturbed top-k operator on GPUs, in Triton."""
