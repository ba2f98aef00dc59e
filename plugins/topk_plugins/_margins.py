"""Checks of margins and class counts, and margins that are larger for rarer classes (Cao et al. 2019)."""

from collections.abc import Sequence

from torch import Tensor

from topk_registry.checks import numbers


def relative_gaps(class_counts: Tensor | Sequence[float] | None) -> Tensor:
    """Return margins [n] that are larger for rarer classes, with the maximum 1: (min_j n_j / n_c)^(1/4) for class c.

    Here n_c is the number of training samples of class c. A class without samples has the margin 1.

    Example:
        >>> relative_gaps([16, 1, 0]).tolist()
        [0.5, 1.0, 1.0]
    """
    counts = checked_counts(class_counts)
    return (counts.min() / counts) ** 0.25


def checked_gaps(alpha: float | Tensor | Sequence[float]) -> Tensor:
    """Return the margins ``alpha`` in double precision: a tensor [] for one margin, or [n] for one margin per class.

    Raises:
        ValueError: a margin is negative or not finite.
    """
    return numbers(alpha, "alpha", at_least=0, or_one=True)


def checked_counts(class_counts: Tensor | Sequence[float] | None) -> Tensor:
    """Return the number of training samples of each class in double precision [n].

    A class without samples gets the count of the rarest class that has samples.

    Raises:
        ValueError: ``class_counts`` is None, a count is negative or not finite, or all counts are 0.

    Example:
        >>> checked_counts([16, 1, 0]).tolist()
        [16.0, 1.0, 1.0]
    """
    if class_counts is None:
        raise ValueError("class_counts is required: the number of training samples of each class [n]")
    counts = numbers(class_counts, "class_counts", at_least=0)
    if not bool((counts > 0).any()):
        raise ValueError(f"class_counts must have a positive entry, got {len(counts)} zeros")
    return counts.clamp(min=counts[counts > 0].min())
