"""Row kernels on GPUs, in Triton."""
