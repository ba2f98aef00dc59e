"""Conformal risk control: the largest threshold whose expected loss stays below alpha (Angelopoulos et al. 2022).

Sample i has a loss L_i(t) between 0 and B that never falls as the threshold t rises. With R(t) the mean loss of N
calibration samples, the threshold

    t = sup {t : N / (N + 1) R(t) + B / (N + 1) <= alpha}

gives a new sample, exchangeable with these, an expected loss of at most alpha. Where losses are independent and have no
jumps at a fixed t the expected loss is at least alpha - 2 B / (N + 1) too (theorems 1 and 2 of arXiv 2208.02814).

The sets of several labels are {c : p_c >= t}, and the loss is the share of a row's labels that its set misses: the
false negative rate. A row without labels misses none. The risk is a sum of fractions whose denominators are numbers of
labels, so it is compared with alpha without rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from array_api_compat import array_namespace, device

from topk_studies.old_trainer.oldsets.scores import Array, as_numpy
from topk_studies.old_trainer.oldsets.thresholds import as_fraction, fewest

PROMISE = (
    "the share of an image's labels that the set misses is at most {alpha:g} in expectation; an image without labels "
    "misses none"
)


@dataclass(frozen=True)
class LabelSets:
    """Sets of several labels: the classes whose probability is at least a threshold.

    Args:
        threshold: the smallest probability of a class in a set. Minus infinity: sets have all classes, as there are too
            few samples for alpha. Infinity: sets are empty, as even that misses too few labels.
        alpha: the false negative rate that is allowed.
        samples: rows that calibrated.
        without_labels: how many of them have no label, and so no loss.
        missing: how many more rows alpha takes; 0 where there are enough.

    Example:
        >>> targets = torch.rand(64, 10) < 0.2
        >>> sets = false_negative_control(held_out_logits.sigmoid(), targets, alpha=0.1)
        >>> sets(logits.sigmoid()).sum(-1)  # how many classes each row gets
    """

    threshold: float
    alpha: float
    samples: int
    without_labels: int = 0
    missing: int = 0

    def __call__(self, probabilities: Array) -> Array:
        """Return the classes of each row's set, bool [B, n], from probabilities [B, n]."""
        xp = array_namespace(probabilities)
        return probabilities >= xp.asarray(self.threshold, dtype=probabilities.dtype, device=device(probabilities))

    @property
    def promise(self) -> str:
        """The guarantee in words, and why sets have all classes where they do."""
        text = PROMISE.format(alpha=self.alpha)
        if self.missing:
            text += f": sets have all classes, as alpha = {self.alpha:g} takes {self.missing} samples more"
        return text


def false_negative_control(probabilities: Array, targets: Array, alpha: float) -> LabelSets:
    """Sets of several labels whose expected false negative rate is at most alpha.

    The threshold is the probability of one of the calibration labels, so classes of equal probability are in a set
    together. Too few samples for alpha are no error: the sets have all classes, and ``missing`` says how many more it
    takes.

    Args:
        probabilities: of each class, held out [N, n]; any finite numbers that order classes will do.
        targets: 1 for the labels of a row, 0 for its other classes [N, n].
        alpha: the share of a row's labels that may be missed, on average over rows.
    """
    values, labels = check_labelled(probabilities, targets)
    counts = labels.sum(-1)
    budget = as_fraction(alpha) * (len(values) + 1) - 1  # of the sum of losses
    facts = {"alpha": alpha, "samples": len(values), "without_labels": int((counts == 0).sum())}
    if budget < 0:
        return LabelSets(-math.inf, missing=fewest(alpha) - len(values), **facts)
    own, row = values[labels], np.nonzero(labels)[0]
    order = np.argsort(own, kind="stable")
    own, size = own[order], counts[row[order]]  # by rising probability; the labels of each label's row
    starts = np.flatnonzero(np.append(True, own[1:] > own[:-1])[: len(own)])  # of each distinct probability

    def total(candidate: int) -> Fraction:
        """The sum of losses with that probability as threshold; the last candidate misses every label."""
        missed = size[: starts[candidate] if candidate < len(starts) else len(size)]
        each = np.bincount(missed)
        return sum((Fraction(int(each[m]), int(m)) for m in np.flatnonzero(each)), Fraction())

    last = _last(len(starts) + 1, lambda candidate: total(candidate) <= budget)
    return LabelSets(float(own[starts[last]]) if last < len(starts) else math.inf, **facts)


def risk_control(losses: Array, alpha: float, *, bound: float = 1.0) -> int | None:
    """The last of G settings whose expected loss is at most alpha; None where there are too few samples for any.

    Args:
        losses: of N samples at G settings, in an order in which no sample's loss falls [N, G].
        alpha: the expected loss that is allowed.
        bound: the largest loss that there can be.
    """
    values = as_numpy(losses).astype(np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"expected losses [N, G], at least one of each, got {list(values.shape)}")
    if not bound < math.inf:
        raise ValueError(f"the bound of the loss must be a finite number, got {bound!r}")
    if not 0 < alpha < bound:
        raise ValueError(f"alpha must be above 0 and below the bound of the loss, {bound:g}, got {alpha!r}")
    if not np.isfinite(values).all() or (values > bound).any() or (np.diff(values, axis=1) < 0).any():
        raise ValueError(f"losses must be finite numbers of at most {bound:g} that never fall along the settings")
    allowed = Fraction(repr(float(alpha))) * (len(values) + 1) - Fraction(bound)
    last = _last(values.shape[1], lambda setting: sum(map(Fraction, values[:, setting].tolist())) <= allowed)
    return None if last < 0 else last


def check_labelled(probabilities: Array, targets: Array) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities, and the targets as bool, as arrays [N, n]; raise where one of them is neither."""
    values, given = as_numpy(probabilities), as_numpy(targets)
    if values.ndim != 2 or values.shape != given.shape:
        raise ValueError(
            f"expected probabilities and targets of one shape [N, n], a column for each class, got "
            f"{list(values.shape)} and {list(given.shape)}"
        )
    finite = np.isfinite(values)
    if not finite.all():
        raise ValueError(f"{int((~finite).sum())} of {values.size} probabilities are no finite numbers")
    return values, check_targets(given)


def check_targets(targets: np.ndarray) -> np.ndarray:
    """Targets of 0 and 1 as bool; raise where others are among them."""
    wrong = (targets != 0) & (targets != 1)
    if wrong.any():
        raise ValueError(f"targets must be 0 or 1, got {targets[wrong][0]} among them")
    return targets.astype(bool)


def _last(count: int, fits: Callable[[int], bool]) -> int:
    """The last of ``count`` candidates that fits, where those that fit come first; -1 if none does."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
