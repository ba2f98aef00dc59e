"""Comparisons and reports of classifiers, as functions of arrays: scores [N, n] and labels [N] of the same images.

Arrays are numpy's, or tensors, which are copied to the CPU. Work is done in double precision, in blocks of rows.
"""

from topk_registry.analysis.measures import label_log_likelihoods, top_classes, topk_credits

__all__ = ["label_log_likelihoods", "top_classes", "topk_credits"]
