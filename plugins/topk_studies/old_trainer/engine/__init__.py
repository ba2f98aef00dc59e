"""Build a run from its parts and train it: epochs, evaluation, checkpoints and signals."""
