"""Risk against coverage: how often the model is wrong on the images that it is most certain of."""

from typing import Any, NamedTuple

import numpy as np

from topk_registry.analysis.measures import Floats
from topk_registry.oldsets.scores import as_numpy


class RiskCurve(NamedTuple):
    """The risk of the most certain images.

    Args:
        coverage: shares of the images that are kept [N].
        risk: mean error of the kept images [N].
        area: the mean of the risk over coverages; 0 is best.
        least: the area of a confidence that puts every right image before every wrong one.
    """

    coverage: Floats
    risk: Floats
    area: float
    least: float

    def at_risk(self, risk: float) -> float:
        """The largest coverage whose risk is at most this; 0 where none is."""
        kept = np.flatnonzero(self.risk <= risk)
        return float(self.coverage[kept[-1]]) if len(kept) else 0.0


def risk_coverage(confidence: Any, errors: Any) -> RiskCurve:
    """Return the risk at each coverage, images kept by falling confidence.

    Images of equal confidence are kept in random order: each has their mean error, so that the order of the images does
    not matter.

    Args:
        confidence: of each image [N].
        errors: 1 for a wrong image, 0 for a right one, or a share [N].

    Example:
        >>> risk_coverage(np.array([0.9, 0.5, 0.7]), np.array([0, 1, 0])).risk
        array([0.        , 0.        , 0.33333333])

    Reference: Geifman and El-Yaniv 2017 (selective classification).
    """
    certain, wrong = (np.asarray(as_numpy(each), np.float64) for each in (confidence, errors))
    if certain.ndim != 1 or certain.shape != wrong.shape or not len(certain):
        raise ValueError(f"expected a confidence and an error of each image, got {certain.shape} and {wrong.shape}")
    if np.isnan(certain).any() or not ((wrong >= 0) & (wrong <= 1)).all():
        raise ValueError("confidence must be numbers, and errors numbers from 0 to 1")
    _, where = np.unique(-certain, return_inverse=True)
    mean = np.bincount(where, wrong) / np.bincount(where)
    counts = np.arange(1, len(certain) + 1)
    risk = np.cumsum(mean[np.sort(where)]) / counts
    least = np.cumsum(np.sort(wrong)) / counts
    return RiskCurve(counts / len(certain), risk, float(risk.mean()), float(least.mean()))
