"""The probability distribution over sets of k classes."""

from topk_registry.distributions.ksubset import KSubset

__all__ = ["KSubset"]
