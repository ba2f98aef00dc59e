"""A module that computes, for each class, the probability that a random set of k classes contains the class."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from topk_registry.checks import integer, number
from topk_registry.ops.ksubset import graph
from topk_registry.ops.ksubset.api import topk_marginals


class TopKOutput(NamedTuple):
    """The result of :class:`TopKHead`. The marginal of a class is P(class in S) for a random set S of k classes."""

    logits: Tensor  # [..., n]: the given logits, but -inf for classes that are not allowed
    marginals: Tensor  # [..., n]: top-k marginals of all classes, as TopKHead defines them
    indices: Tensor  # [..., k]: classes in descending order of logits; -1 in the last places if too few are allowed


class TopKHead(nn.Module):
    """A module that computes the top-k marginal of each class and selects the k classes with the largest logits.

    The top-k marginal of class i is P(i in S), where S is a random set of k classes. The probability of a set is
    proportional to the product of exp(logit / temperature) over the classes in the set. The marginals of a row sum to
    k. If k = 1, the marginals are softmax(logits / temperature). The marginals are differentiable with respect to the
    logits. For logits in half precision, the marginals are float32.

    ``head(logits, allowed=mask)`` allows only sets of the classes for which ``mask`` is True. Every other class has the
    marginal 0. If at most k allowed classes have a logit above -inf, the marginals of these classes are 1.

    Args:
        k: number of classes in the set, 1 <= k <= n - 1.
        temperature: positive number by which logits are divided. For a model trained with ``topk_nll`` or
            ``smooth_topk_svm``, use k * tau, where k and tau are options of the loss. See :meth:`of_loss`.

    Shape: logits [..., n], allowed bool [n] or [..., n] -> :class:`TopKOutput`.

    Example:
        >>> head = TopKHead(2)
        >>> head(torch.tensor([2.0, 1.0, 0.0, -1.0])).indices
        tensor([0, 1])
        >>> head(torch.tensor([2.0, 1.0, 0.0, -1.0]), allowed=torch.tensor([False, True, True, True])).indices
        tensor([1, 2])

    Reference: Berrada, Zisserman, Kumar 2018, section 5.2 and appendix C.
    """

    def __init__(self, k: int, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.k = integer(k, "k", at_least=1)
        self.temperature = number(temperature, "temperature", above=0)

    @classmethod
    def of_loss(cls, loss: nn.Module) -> "TopKHead":
        """Return a head with the ``k`` and the ``marginal_temperature`` of a loss.

        Use this head for the predictions of a model that was trained with the loss. For example, the value of
        ``topk_nll`` is -tau log(p), where p is the marginal of the label from this head. If the loss has several
        values of k, the head uses the largest. If the loss has no ``k`` or no ``marginal_temperature``, raise
        ValueError.

        Example:
            >>> TopKHead.of_loss(create_loss("topk_nll", k=5, tau=0.2))  # the temperature of this loss is k * tau
            TopKHead(k=5, temperature=1)
        """
        k, temperature = getattr(loss, "k", None), getattr(loss, "marginal_temperature", None)
        if k is None or temperature is None:
            raise ValueError(
                f"expected a loss of top-k marginals, such as topk_nll or smooth_topk_svm, got {type(loss).__name__}: "
                "pass k and temperature to TopKHead instead"
            )
        return cls(k, temperature=temperature)

    def forward(self, logits: Tensor, allowed: Tensor | None = None) -> TopKOutput:
        if allowed is not None:
            _check_allowed(allowed, logits)
            logits = logits.masked_fill(~allowed, -torch.inf)
        if torch.compiler.is_exporting():  # an exported model needs fixed shapes and standard operators only
            rows = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
            marginals = graph.marginals(rows, self.k, self.temperature).view(logits.shape)
        else:
            marginals = topk_marginals(logits, self.k, temperature=self.temperature)
        # rank the classes by logits, because several marginals of a sample can round to 1
        top, indices = logits.topk(self.k)
        if allowed is not None:
            indices = torch.where(top == -torch.inf, -1, indices)
        return TopKOutput(logits, marginals, indices)

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, logits: Tensor, allowed: Tensor | None = None) -> TopKOutput: ...

    def extra_repr(self) -> str:
        return f"k={self.k}, temperature={self.temperature:g}"


def _check_allowed(allowed: Tensor, logits: Tensor) -> None:
    if allowed.dtype != torch.bool or allowed.shape[-1:] != logits.shape[-1:] or allowed.ndim > logits.ndim:
        raise ValueError(
            f"allowed must be bool [n] or of the shape of the logits {list(logits.shape)}, got {allowed.dtype} "
            f"{list(allowed.shape)}"
        )
