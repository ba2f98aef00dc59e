"""Benchmarks, gated by the tests: ``python -m tests.bench ksubset``."""
