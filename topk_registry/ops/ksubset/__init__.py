"""The k-subset operator: for each class, the exact probability that a random set of k classes contains the class.

The probability of a set is proportional to the product of exp(score) over the classes of the set. README.md in this
folder has the definition and the algorithm.
"""

from topk_registry.ops.ksubset.api import topk_label_margins, topk_log_odds, topk_marginals, topk_margins

__all__ = ["topk_label_margins", "topk_log_odds", "topk_marginals", "topk_margins"]
