"""Prediction sets by split conformal prediction, for NumPy arrays.

A prediction set is a set of classes. You choose a number alpha, and the set of a new sample contains the true class
with probability at least 1 - alpha. :func:`calibrate` takes the logits and labels of samples that were not used for
training. The function returns a :class:`PredictionSets` object. A call of this object with new logits returns the set
of each sample:

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> logits = 3 * rng.standard_normal((2000, 10))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    >>> sets = calibrate(logits[:1000], labels[:1000], alpha=0.1)
    >>> inside = sets(logits[1000:])  # bool [N, n]
    >>> bool(SetCounts.of(inside, labels[1000:]).summary()["coverage"] > 0.85)
    True
"""

from topk_registry.conformal.coverage import beta_quantile, binomial_interval
from topk_registry.conformal.scores import SCORES, Score, log_probabilities, probabilities
from topk_registry.conformal.sets import PredictionSets, calibrate, guarantee
from topk_registry.conformal.summary import SetCounts
from topk_registry.conformal.temperature import fit_temperature
from topk_registry.conformal.thresholds import LEVELS, RULES, fewest, order_of, threshold, threshold_table

__all__ = [
    "LEVELS",
    "RULES",
    "SCORES",
    "PredictionSets",
    "Score",
    "SetCounts",
    "beta_quantile",
    "binomial_interval",
    "calibrate",
    "fewest",
    "fit_temperature",
    "guarantee",
    "log_probabilities",
    "order_of",
    "probabilities",
    "threshold",
    "threshold_table",
]
