"""Comparisons and reports of classifiers, as functions of arrays: scores [N, n] and labels [N] of the same images.

Arrays are numpy's, or tensors, which are copied to the CPU. Work is done in double precision, in blocks of rows.
"""

from topk_registry.analysis.duplicates import DuplicateGroup, duplicate_groups, picture_hash
from topk_registry.analysis.labels import LabelIssues, class_thresholds, confident_joint, label_issues
from topk_registry.analysis.measures import label_log_likelihoods, top_classes, topk_credits

__all__ = [
    "DuplicateGroup",
    "LabelIssues",
    "class_thresholds",
    "confident_joint",
    "duplicate_groups",
    "label_issues",
    "label_log_likelihoods",
    "picture_hash",
    "top_classes",
    "topk_credits",
]
