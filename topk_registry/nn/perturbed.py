"""The perturbed k-th largest entry as a module for use inside networks."""

from typing import TYPE_CHECKING

from torch import Generator, Tensor, nn

from topk_registry.ops.perturbed.api import checked_options, perturbed_topk


class PerturbedTopK(nn.Module):
    """The smoothed k-th largest entry of the last axis: :func:`perturbed_topk` as a module.

    Unlike dropout, the module also draws noise in evaluation mode, because the noise defines the function. For
    reproducible values, pass a seeded generator. For less variance, increase ``num_samples``. With ``epsilon=0``, the
    result is the plain k-th largest entry.

    Args:
        k: rank of the entry, where 1 is the largest, 1 <= k <= n.
        epsilon: standard deviation of the noise, in units of the scores.
        num_samples: number of noise draws in the average.

    Example:
        >>> import torch
        >>> PerturbedTopK(2, epsilon=0.0)(torch.tensor([[3.0, 1.0, 2.0]]))
        tensor([2.])
    """

    k: int
    epsilon: float
    num_samples: int

    def __init__(self, k: int, *, epsilon: float = 1.0, num_samples: int = 5) -> None:
        super().__init__()
        self.k, self.epsilon, self.num_samples = checked_options(k, epsilon, num_samples)

    def forward(self, scores: Tensor, *, generator: Generator | None = None, noise: Tensor | None = None) -> Tensor:
        return perturbed_topk(
            scores,
            self.k,
            epsilon=self.epsilon,
            num_samples=self.num_samples,
            generator=generator,
            noise=noise,
        )

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(
            self, scores: Tensor, *, generator: Generator | None = None, noise: Tensor | None = None
        ) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"k={self.k}, epsilon={self.epsilon:g}, num_samples={self.num_samples}"
