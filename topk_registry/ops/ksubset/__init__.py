"""The k-subset operator: for each class, the exact probability that a random set of k classes contains the class.

README.md in this folder has the definition and the algorithm.
"""

from topk_registry.ops.ksubset.api import smooth_topk, topk_label_margins, topk_log_odds, topk_marginals, topk_margins

__all__ = ["smooth_topk", "topk_label_margins", "topk_log_odds", "topk_marginals", "topk_margins"]
