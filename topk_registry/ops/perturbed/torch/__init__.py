"""The perturbed top-k operator in plain torch operations."""
