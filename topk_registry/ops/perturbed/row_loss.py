"""The hinge on the perturbed k-th largest score, as a row loss."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from topk_registry.ops.distributed import by_shards, generator_of_shard, is_distributed
from topk_registry.ops.perturbed.api import SEEDS, checked_options, perturbed_topk
from topk_registry.ops.perturbed.backends import EPSILONS
from topk_registry.ops.perturbed.numba.table import table
from topk_registry.ops.rows.api import RowLoss
from topk_registry.ops.rows.numba.backend import RowKernel, on_cpu
from topk_registry.ops.targets.table import of_table, wide
from topk_registry.ops.values import number


def perturbed_hinge_rows(
    k: int,
    *,
    epsilon: float = 1.0,
    num_samples: int = 5,
    alpha: float | Tensor = 1.0,
    scale: float = 1.0,
    impl: str = "auto",
) -> RowLoss:
    """The hinge scale (alpha_y + E_Z[(s + epsilon Z)_[k]] - s_y)_+ of a label y, for
    :func:`topk_registry.rows.row_losses`.

    Args:
        k: which largest score the label is held against, 1 <= k <= n.
        epsilon: standard deviation of the noise, in the unit of the scores.
        num_samples: how many draws estimate the expectation and its gradient. They come from torch's global generator.
        alpha: required gap, one for all classes or one a class [n]; it gets no gradient.
        scale: factor of the loss.
        impl: as in :func:`topk_registry.functional.perturbed_topk`.

    Example:
        >>> loss = perturbed_hinge_rows(2, epsilon=0.0)
        >>> row_losses(loss, torch.tensor([[2.0, 1.5, -3.0]]), torch.tensor([0]))
        tensor([0.5000])
    """
    k, epsilon, num_samples = checked_options(k, epsilon, num_samples, impl)
    options = k, epsilon, num_samples, alpha, number(scale, "scale")
    compiled = impl in ("auto", "numba") and EPSILONS[0] <= epsilon <= EPSILONS[1]
    gap, own = (None, alpha) if isinstance(alpha, Tensor) else (number(alpha, "alpha"), None)
    kernel = partial(_kernel, *options[:3], gap, options[4]) if compiled else None
    return RowLoss(partial(definition, *options, impl), kernel, own=(own,), piecewise_linear=True, more_than=k - 1)


def definition(
    k: int,
    epsilon: float,
    num_samples: int,
    alpha: float | Tensor,
    scale: float,
    impl: str,
    scores: Tensor,
    target: Tensor | None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The losses in torch operations beside the operator."""
    if is_distributed(scores):
        # from the global generator all ranks, which are seeded alike, would draw the same noise
        own = generator_of_shard(scores, generator)
        of_shard = partial(definition, k, epsilon, num_samples, alpha, scale, impl, generator=own)
        return by_shards(of_shard, scores, target)
    s = wide(scores)
    threshold = perturbed_topk(s, k, epsilon=epsilon, num_samples=num_samples, generator=generator, impl=impl)
    own = alpha.to(s) if isinstance(alpha, Tensor) else alpha
    if target is None or target.is_floating_point():
        return of_table(scale * (own + threshold[:, None] - s).clamp(min=0), target)
    gap = own[target] if isinstance(own, Tensor) else own
    return scale * (gap + threshold - s.gather(1, target[:, None])[:, 0]).clamp(min=0)


@lru_cache(maxsize=64)
def _kernel(k: int, epsilon: float, num_samples: int, alpha: float | None, scale: float) -> RowKernel:
    def tensors(dtype: torch.dtype, own: Tensor | None):
        return on_cpu(own, dtype), table(), torch.randint(SEEDS, (1,))

    numbers = k, num_samples, epsilon, alpha or 0.0, scale
    return RowKernel("perturbed.numba.row:row", numbers, tensors=tensors, of_label=True)
