"""The k-subset operator: exact log-odds and probabilities that a class is in the top-k set. See README.md."""

from topk_registry.ops.ksubset.api import smooth_topk, topk_label_margins, topk_log_odds, topk_marginals, topk_margins

__all__ = ["smooth_topk", "topk_label_margins", "topk_log_odds", "topk_marginals", "topk_margins"]
