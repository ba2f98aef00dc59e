"""Mean size of prediction sets at one coverage, with the threshold found anew in each resample of the images.

The set of an image has the classes whose probability is at least a threshold (score ``lac`` of
:mod:`topk_registry.oldsets`): of all sets of a coverage these are the smallest on average. The threshold is the order
statistic of the labels' probabilities that split conformal prediction takes, so that models are compared at the same
number of covered images.
"""

import math

import numpy as np

from topk_registry.analysis.measures import Floats, Integers, blocks, log_softmax
from topk_registry.analysis.paired import Statistic
from topk_registry.oldsets.thresholds import as_fraction, order_of

GRID = 65  # thresholds at which sizes are counted; resamples lie between them
REACH = 6.0  # standard deviations of a resampled order statistic that the thresholds span


def set_size_of(logits: np.ndarray, likelihoods: Floats, coverage: float, order: Integers) -> tuple[float, Statistic]:
    """Return the mean size at a coverage, and the same as a function of draws [b, N].

    Args:
        logits: scores [N, n].
        likelihoods: log-likelihoods of the labels [N].
        coverage: the share of labels that sets hold.
        order: of the images in the draws [N].
    """
    count = len(likelihoods)
    own = -likelihoods  # a class is in the set where its own such value is at most the threshold
    place = min(order_of(count, 1 - as_fraction(coverage)), count)  # from 1, by rising values
    spread = REACH * math.sqrt(count * coverage * (1 - coverage)) + 1
    first, last = (int(np.clip(place - 1 + side * spread, 0, count - 1)) for side in (-1, 1))
    rising = np.argsort(own, kind="stable")
    places = np.unique(np.append(np.rint(np.linspace(first, last, GRID)).astype(int), place - 1))
    sizes = _sizes(logits, own[rising[places]])  # [N, G]
    mean = float(sizes[:, np.searchsorted(places, place - 1)].mean())
    where = np.empty(count, np.int64)
    where[order] = np.arange(count)  # the place of each image in the draws
    below = np.zeros(count)
    below[where[rising[:first]]] = 1.0
    window, sizes = where[rising[first : last + 1]], sizes[order]

    def statistic(drawn: Floats) -> Floats:
        reached = (drawn @ below)[:, None] + np.cumsum(drawn[:, window], axis=1)  # covered by each threshold
        threshold_places = np.minimum(first + (reached < place).sum(1), last)
        return _between(places, drawn @ sizes / count, threshold_places)

    return mean, statistic


def _sizes(logits: np.ndarray, limits: Floats) -> Floats:
    """How many classes of each image have at most these values, which rise [N, G]."""
    sizes = np.empty((len(logits), len(limits)))
    for rows in blocks(len(logits)):
        values = -log_softmax(logits[rows])
        bins = np.searchsorted(limits, values) + (len(limits) + 1) * np.arange(len(values))[:, None]
        counts = np.bincount(bins.ravel(), minlength=len(values) * (len(limits) + 1))
        sizes[rows] = counts.reshape(len(values), -1).cumsum(1)[:, :-1]
    return sizes


def _between(places: np.ndarray, curves: Floats, wanted: np.ndarray) -> Floats:
    """The value of each row's curve [b, G] at its wanted place [b], linear between places."""
    if len(places) == 1:
        return curves[:, 0]
    right = np.clip(np.searchsorted(places, wanted), 1, len(places) - 1)
    left = right - 1
    share = (wanted - places[left]) / (places[right] - places[left])
    rows = np.arange(len(curves))
    return (1 - share) * curves[rows, left] + share * curves[rows, right]
