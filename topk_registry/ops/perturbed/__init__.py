"""The perturbed top-k operator: the k-th largest score, smoothed by Gaussian noise.

The k-th largest entry of s has a gradient that is one-hot: it moves one score and jumps when two scores cross. Its
expectation under noise, f_eps(s) = E[(s + eps Z)_[k]] with Z standard normal, is smooth, and its gradient is the chance
of each class to be the k-th: E[one-hot of the k-th]. Both expectations are estimated from the same few draws.
"""

from topk_registry.ops.perturbed.api import perturbed_topk

__all__ = ["perturbed_topk"]
