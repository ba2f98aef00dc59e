"""Flags of a training run, and how they are read."""
