"""Do probabilities come true? Calibration errors in bins of equal mass and without bins, Brier scores.

The functions take the probability of an event for each image, such as "the best class is the label", and whether it
came true.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topk_registry.analysis.measures import Floats, Integers
from topk_registry.oldsets.scores import as_numpy

BINS = 15
CELLS = 1 << 12  # of [0, 1], in which residuals are smoothed: finer than any bandwidth that images can tell


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram with its errors.

    Args:
        predicted: mean probability of each bin.
        observed: share of events that came true.
        images: in each bin.
        calibration_error: mean difference of the two over images.
        smooth_calibration_error: the same without bins, see :func:`smooth_calibration_error`.
    """

    predicted: Floats
    observed: Floats
    images: Integers
    calibration_error: float
    smooth_calibration_error: float


def reliability(probabilities: Any, events: Any, *, bins: int = BINS) -> Reliability:
    """Return the reliability diagram of events, in bins of as many images each.

    Equal probabilities are never parted, so that the order of the images does not matter; bins that they fill are one.

    Args:
        probabilities: of the events, in [0, 1] [N].
        events: whether they came true [N]; a share of a hit counts as such.
        bins: how many, at most.
    """
    p, hits = _checked(probabilities, events)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins!r}")
    upper = -(-np.arange(bins + 1) * len(p) // bins) - 1  # the last image of each bin
    return _diagram(p, hits, np.unique(np.sort(p)[np.maximum(upper, 0)]))


def calibration_error(probabilities: Any, events: Any, *, bins: int = BINS, equal_width: bool = False) -> float:
    """Return the expected calibration error: the mean over images of the gap of a bin.

    Args:
        probabilities, events: see :func:`reliability`.
        bins: how many, at most.
        equal_width: bins of equal width in [0, 1], in place of bins of as many images.

    Example:
        >>> calibration_error(np.array([0.8, 0.8, 0.8, 0.8]), np.array([1, 1, 1, 0]))
        0.05...
    """
    p, hits = _checked(probabilities, events)
    if not equal_width:
        return reliability(p, hits, bins=bins).calibration_error
    return _diagram(p, hits, np.linspace(0, 1, bins + 1)).calibration_error


def _diagram(p: Floats, hits: Floats, edges: Floats) -> Reliability:
    inside = np.searchsorted(edges[1:-1], p)  # a bin holds its upper edge
    count = len(edges) - 1 if len(edges) > 1 else 1
    images, predicted, observed = (np.bincount(inside, w, minlength=count) for w in (None, p, hits))
    full = images > 0
    images, predicted, observed = images[full], predicted[full], observed[full]
    error = float(np.abs(observed - predicted).sum() / len(p))
    return Reliability(predicted / images, observed / images, images, error, smooth_calibration_error(p, hits))


def smooth_calibration_error(probabilities: Any, events: Any) -> float:
    """Return the smooth calibration error, which has neither bins nor a bandwidth to choose.

    The residuals event - probability are smoothed over the probabilities by a Gaussian of deviation s that is reflected
    at 0 and 1; the error at s is the integral of the absolute value, which falls with s. The smooth error is the s at
    which the error is s itself.

    Args:
        probabilities, events: see :func:`reliability`.

    Reference: Blasiok and Nakkiran 2024, *Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing*,
    arXiv 2309.12236, Definitions 3 and 5.
    """
    p, hits = _checked(probabilities, events)
    place = p * (CELLS - 1)  # cells around 0, h, ..., 1: a residual is shared by its two neighbours
    low = np.minimum(place.astype(int), CELLS - 2)
    share, residual = place - low, (hits - p) / len(p)
    cells = np.bincount(low, (1 - share) * residual, minlength=CELLS)
    cells += np.bincount(low + 1, share * residual, minlength=CELLS)
    # reflected at both ends the residuals have period 2, and a Gaussian multiplies their Fourier coefficients
    around = np.concatenate((cells, cells[-2:0:-1]))
    around[[0, CELLS - 1]] *= 2  # the ends are their own mirror images
    coefficients = np.fft.rfft(around)
    waves = np.pi * np.arange(len(coefficients))

    def error(deviation: float) -> float:
        smooth = np.fft.irfft(coefficients * np.exp(-0.5 * (waves * deviation) ** 2), len(around))[:CELLS]
        smooth[[0, -1]] /= 2  # half a cell lies inside
        return float(np.abs(smooth).sum())

    below, above = 0.0, 1.0
    for _ in range(40):
        middle = (below + above) / 2
        below, above = (middle, above) if error(middle) > middle else (below, middle)
    return (below + above) / 2


def brier_score(probabilities: NDArray[Any], labels: Integers) -> float:
    """Return the Brier score: the mean over images of the squared distance of p from the label's unit vector, 0 to 2.

    Args:
        probabilities: of the classes [N, n].
        labels: of the images [N].
    """
    own = probabilities[np.arange(len(labels)), labels]
    return float((np.square(probabilities).sum(1) - 2 * own + 1).mean())


def _checked(probabilities: Any, events: Any) -> tuple[Floats, Floats]:
    p, hits = (np.asarray(as_numpy(each), np.float64) for each in (probabilities, events))
    if p.ndim != 1 or p.shape != hits.shape or not len(p):
        raise ValueError(f"expected a probability and an event of each image, got {p.shape} and {hits.shape}")
    if not (p.min() >= 0 and p.max() <= 1 + 1e-9 and hits.min() >= 0 and hits.max() <= 1):
        raise ValueError("probabilities and events must be in [0, 1]")
    return p.clip(max=1.0), hits
