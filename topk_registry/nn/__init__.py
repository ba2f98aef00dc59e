"""Modules for models: prediction head, classifiers, linear top-k layer, perturbed top-k."""
