"""A module that computes the k-th largest logit, smoothed by random noise."""

from typing import TYPE_CHECKING

from torch import Generator, Tensor, nn

from topk_registry.ops.perturbed.api import checked_options, perturbed_topk


class PerturbedTopK(nn.Module):
    """A module that returns the k-th largest logit of each row, smoothed by random noise (:func:`perturbed_topk`).

    The module draws Gaussian noise ``num_samples`` times. For each draw, the module adds the noise to the logits and
    takes the k-th largest noisy logit of each row. The result is the mean over the draws. In contrast to dropout, the
    module adds noise in evaluation mode too. For reproducible results, pass a seeded ``generator`` in the call.

    Args:
        k: rank of the logit, 1 <= k <= n. The largest logit has rank 1.
        epsilon: standard deviation of the noise, in units of the logits. With 0, there is no noise.
        num_samples: number of draws of the noise. More draws reduce the variance of the result.

    Shape: logits [..., n] -> [...]. With ``noise=z`` [num_samples, ..., n], the noise is epsilon * z.

    Example:
        >>> import torch
        >>> PerturbedTopK(2, epsilon=0.0)(torch.tensor([[3.0, 1.0, 2.0]]))
        tensor([2.])
    """

    def __init__(self, k: int, *, epsilon: float = 1.0, num_samples: int = 5) -> None:
        super().__init__()
        self.k, self.epsilon, self.num_samples = checked_options(k, epsilon, num_samples)

    def forward(self, logits: Tensor, *, generator: Generator | None = None, noise: Tensor | None = None) -> Tensor:
        return perturbed_topk(
            logits, self.k, epsilon=self.epsilon, num_samples=self.num_samples, generator=generator, noise=noise
        )

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(
            self, logits: Tensor, *, generator: Generator | None = None, noise: Tensor | None = None
        ) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"k={self.k}, epsilon={self.epsilon:g}, num_samples={self.num_samples}"
