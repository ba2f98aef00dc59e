"""The k-subset operator: exact log-odds and probabilities of each class in a random set of k. See README.md."""

from topk_registry.ops.ksubset.api import smooth_topk, topk_label_margins, topk_log_odds, topk_marginals, topk_margins

__all__ = ["smooth_topk", "topk_label_margins", "topk_log_odds", "topk_marginals", "topk_margins"]
