"""Comparisons and reports of classifiers, as functions of arrays: scores [N, n] and labels [N] of the same images.

Arrays are numpy's, or tensors, which are copied to the CPU. Work is done in double precision, in blocks of rows.
"""

from topk_registry.analysis.calibration import brier_score, calibration_error, reliability, smooth_calibration_error
from topk_registry.analysis.comparison import Comparison, compare
from topk_registry.analysis.comparison_page import comparison_page
from topk_registry.analysis.confusion import confused_pairs, look_alikes
from topk_registry.analysis.duplicates import DuplicateGroup, duplicate_groups, picture_hash
from topk_registry.analysis.labels import LabelIssues, class_thresholds, confident_joint, label_issues
from topk_registry.analysis.measures import label_log_likelihoods, top_classes, topk_credits
from topk_registry.analysis.model_report import Report, report
from topk_registry.analysis.paired import holm, mcnemar
from topk_registry.analysis.report_page import report_page
from topk_registry.analysis.risk import risk_coverage

__all__ = [
    "Comparison",
    "DuplicateGroup",
    "LabelIssues",
    "Report",
    "brier_score",
    "calibration_error",
    "class_thresholds",
    "compare",
    "comparison_page",
    "confident_joint",
    "confused_pairs",
    "duplicate_groups",
    "holm",
    "label_issues",
    "label_log_likelihoods",
    "look_alikes",
    "mcnemar",
    "picture_hash",
    "reliability",
    "report",
    "report_page",
    "risk_coverage",
    "smooth_calibration_error",
    "top_classes",
    "topk_credits",
]
