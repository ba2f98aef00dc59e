"""PyTorch modules: classifiers, output layers that compute a loss, small networks, modules for top-k predictions."""
