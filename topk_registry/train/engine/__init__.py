"""Epochs, evaluation, checkpoints and signals."""
