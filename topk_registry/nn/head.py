"""The prediction head: top-k marginals as a module."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from topk_registry.ops.ksubset import graph
from topk_registry.ops.ksubset.api import topk_marginals
from topk_registry.ops.values import integer, number


class TopKOutput(NamedTuple):
    """Scores, top-k marginals, and the k classes with the largest scores in descending order."""

    logits: Tensor  # [..., n]; -inf for classes that ``allowed`` excludes
    marginals: Tensor  # [..., n], sums to k
    indices: Tensor  # [..., k], most probable first; -1 if fewer than k classes are allowed


class TopKHead(nn.Module):
    """Compute top-k marginals: for each class, the probability that the class is in a random set of k classes.

    The marginal of class i is pi_i = P(i in S), where S is a random set of k classes. The probability of a set is
    proportional to the product of exp(logit / temperature) over its members. The marginals of a row sum to k. Marginals
    are differentiable. For k = 1, they are softmax. For logits in half precision, the marginals are float32.

    ``head(logits, allowed=mask)`` restricts the set to allowed classes. The marginal of every other class is 0. If at
    most k classes are allowed and have a logit above -inf, each of these classes has the marginal 1.

    Args:
        k: size of the set, 1 <= k <= n - 1.
        temperature: positive number by which logits are divided. For a model trained with ``topk_nll`` or
            ``smooth_topk_svm``, use k * tau, see :meth:`of_loss`.

    Shape: logits [..., n], allowed bool [n] or [..., n] -> :class:`TopKOutput`.

    Example:
        >>> head = TopKHead(2)
        >>> head(torch.tensor([2.0, 1.0, 0.0, -1.0])).indices
        tensor([0, 1])
        >>> head(torch.tensor([2.0, 1.0, 0.0, -1.0]), allowed=torch.tensor([False, True, True, True])).indices
        tensor([1, 2])

    Reference: Berrada, Zisserman, Kumar 2018, section 5.2 and appendix C.
    """

    k: int
    temperature: float

    def __init__(self, k: int, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.k = integer(k, "k", at_least=1)
        self.temperature = number(temperature, "temperature", above=0)

    @classmethod
    def of_loss(cls, loss: nn.Module) -> "TopKHead":
        """Return the head for the marginals that a loss trains, from the loss's ``k`` and ``temperature``.

        ``topk_nll`` is tau times the negative log of the label's marginal. For a loss with several k, the head has the
        largest k.

        Example:
            >>> TopKHead.of_loss(create_loss("topk_nll", k=5, tau=0.2))
            TopKHead(k=5, temperature=1)
        """
        k, temperature = getattr(loss, "k", None), getattr(loss, "temperature", None)
        if k is None or temperature is None:
            raise ValueError(
                f"expected a loss with k and temperature, such as topk_nll or smooth_topk_svm, got "
                f"{type(loss).__name__}: give TopKHead k and temperature themselves"
            )
        return cls(k, temperature=temperature)

    def forward(self, logits: Tensor, allowed: Tensor | None = None) -> TopKOutput:
        if allowed is not None:
            _check_allowed(allowed, logits)
            logits = logits.masked_fill(~allowed, -torch.inf)
        # ranked by logits: marginals have the same order but saturate at 1, which would cause ties
        top, indices = logits.topk(self.k)
        if allowed is not None:
            indices = torch.where(top == -torch.inf, -1, indices)
        return TopKOutput(logits, _marginals(logits, self.k, self.temperature), indices)

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, logits: Tensor, allowed: Tensor | None = None) -> TopKOutput: ...

    def extra_repr(self) -> str:
        return f"k={self.k}, temperature={self.temperature:g}"


def _marginals(logits: Tensor, k: int, temperature: float) -> Tensor:
    """Compute marginals. An exported model gets a form with fixed shapes and standard operators."""
    if not torch.compiler.is_exporting():
        return topk_marginals(logits, k, temperature=temperature)
    rows = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    return graph.marginals(rows, k, temperature).view(logits.shape)


def _check_allowed(allowed: Tensor, logits: Tensor) -> None:
    if allowed.dtype != torch.bool or allowed.shape[-1:] != logits.shape[-1:] or allowed.ndim > logits.ndim:
        raise ValueError(
            f"allowed must be bool [n] or of the shape of the logits {list(logits.shape)}, got {allowed.dtype} "
            f"{list(allowed.shape)}"
        )
