"""Modules of data that the old trainer uses."""
