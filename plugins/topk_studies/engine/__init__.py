"""Runs of a study: configurations, cache, workers, tuning, statistics."""
