"""Class counts, and margins that are larger for rarer classes (Cao et al. 2019)."""

from torch import Tensor


def relative_gaps(class_counts: Tensor) -> Tensor:
    """Return margins [n] that are larger for rarer classes, with the maximum 1: (min_j n_j / n_c)^(1/4) for class c.

    Here n_c is the number of training samples of class c. A class without samples has the margin 1.

    Example:
        >>> relative_gaps(torch.tensor([16, 1, 0])).tolist()
        [0.5, 1.0, 1.0]
    """
    counts = positive_counts(class_counts)
    return (counts.min() / counts) ** 0.25


def positive_counts(class_counts: Tensor) -> Tensor:
    """Return the number of training samples of each class in double precision [n].

    A class without samples gets the count of the rarest class that has samples.

    Raises:
        ValueError: all counts are 0.

    Example:
        >>> positive_counts(torch.tensor([16, 1, 0])).tolist()
        [16.0, 1.0, 1.0]
    """
    counts = class_counts.double()
    if not bool((counts > 0).any()):
        raise ValueError(f"class_counts must have a positive entry, got {len(counts)} zeros")
    return counts.clamp(min=counts[counts > 0].min())
