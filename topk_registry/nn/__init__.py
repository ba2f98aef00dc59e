"""Modules that models are built from: prediction head, classifiers, linear top-k layer, perturbed top-k."""
