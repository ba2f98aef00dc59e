"""PyTorch modules: a prediction head, a cosine classifier, output layers with a loss, networks, perturbed top-k."""
