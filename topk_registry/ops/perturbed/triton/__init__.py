"""The perturbed top-k operator as a Triton kernel."""
