"""Class counts, and gaps that grow as classes get rarer (the margins of Cao et al. 2019), for losses for long tails."""

from collections.abc import Sequence

import torch
from torch import Tensor


def ldam_margins(class_counts: Tensor | Sequence[float] | None, max_margin: float) -> Tensor:
    """Return the required gap of each class: ``max_margin`` for the rarest, less for others by the fourth root of size.

        m_c = max_margin * n_c^(-1/4) / max_j n_j^(-1/4) = max_margin * (min_j n_j / n_c)^(1/4)

    A class without samples gets the gap of the rarest class that has some, so that it does not change the others'.

    Args:
        class_counts: how many training samples each class has [n].
        max_margin: the largest gap.

    Returns:
        Gaps [n] in the default dtype.

    Example:
        >>> ldam_margins([16, 1, 0], 0.5)
        tensor([0.2500, 0.5000, 0.5000])

    Reference:
        Cao, Wei, Gaidon, Arechiga, Ma. Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss. 2019.
    """
    counts = checked_counts(class_counts)
    if not max_margin >= 0:
        raise ValueError(f"max_margin must be at least 0, got {max_margin!r}")
    return (max_margin * (counts.min() / counts) ** 0.25).to(torch.get_default_dtype())


def checked_counts(class_counts: Tensor | Sequence[float] | None) -> Tensor:
    """Return training samples of each class [n] in double precision; a class without any counts as the rarest one.

    Example:
        >>> checked_counts([16, 1, 0]).tolist()
        [16.0, 1.0, 1.0]
    """
    if class_counts is None:
        raise ValueError("class_counts is required: the number of training samples of each class [n]")
    counts = torch.as_tensor(class_counts, dtype=torch.float64).detach().clone()
    if counts.ndim != 1 or not bool((counts >= 0).all() and counts.isfinite().all() and (counts > 0).any()):
        raise ValueError(
            "class_counts must hold one finite non-negative number a class, not all of them zero, "
            f"got {counts.tolist() if counts.numel() <= 10 else list(counts.shape)}"
        )
    return counts.clamp(min=counts[counts > 0].min())
