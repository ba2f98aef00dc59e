"""Temperature scaling (Guo et al. 2017): one number that divides all logits, fitted on labeled samples."""

import math

import numpy as np

from topk_registry.conformal.scores import log_probabilities
from topk_registry.conformal.thresholds import check_labels

RANGE = (1e-4, 1e4)  # of the temperature
STEPS = 60  # of the bisection; each step halves the interval of the logarithm


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature T with the smallest negative log-likelihood of the labels under softmax(logits / T).

    The likelihood has one maximum: with b = 1 / T, its derivative is the mean of z_y - sum_i p_i z_i, which decreases
    in b. The function finds the zero by bisection, between the ends of ``RANGE``. If all labels are predicted
    correctly, there is no zero, and the result is the lower end.

    Args:
        logits: [N, n] with N >= 1. The logit -inf excludes a class. If the logit of a sample's label is -inf, the
            function skips the sample, because its probability is 0 at every temperature.
        labels: class indices [N].

    Raises:
        ValueError: all samples are skipped, or the logits of a sample contain NaN or +inf, or are all -inf.
    """
    z = np.asarray(logits, np.float64)
    labels = check_labels(labels, z.shape[-1])
    if not np.isfinite(z.max(-1)).all():
        raise ValueError("a row of logits contains NaN or +inf, or only -inf")
    counted = z[np.arange(len(labels)), labels] > -np.inf
    if not counted.any():
        raise ValueError("the fit of a temperature needs at least one sample with a finite logit of its label")
    z, labels = (z - z.max(-1, keepdims=True))[counted], labels[counted]
    at_label = z[np.arange(len(labels)), labels]
    finite = np.where(np.isfinite(z), z, 0.0)
    low, high = (math.log(end) for end in RANGE)
    for _ in range(STEPS):
        middle = (low + high) / 2
        p = np.exp(log_probabilities(z, math.exp(middle)))
        too_flat = float((at_label - (p * finite).sum(-1)).mean()) > 0
        low, high = (low, middle) if too_flat else (middle, high)
    return math.exp((low + high) / 2)
