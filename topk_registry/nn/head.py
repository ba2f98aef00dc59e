"""The prediction head: top-k marginals as a module, alone or after any classifier."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from topk_registry.nn.classifier import num_classes_of
from topk_registry.ops.ksubset import graph
from topk_registry.ops.ksubset.api import topk_label_margins, topk_marginals
from topk_registry.ops.values import integer, number


class TopKOutput(NamedTuple):
    """Scores, top-k marginals, and the k classes with the largest scores in descending order."""

    logits: Tensor  # [..., n]; -inf for classes that ``allowed`` excludes
    marginals: Tensor  # [..., n], sums to k
    indices: Tensor  # [..., k], most probable first; -1 if fewer than k classes are allowed


class TopKHead(nn.Module):
    """Compute top-k marginals: the probability that each class is in the top-k set.

    The marginal of class i is pi_i = P(i in S), where S is a random set of k classes. The probability of a set is
    proportional to the product of exp(logit / temperature) over its members. Marginals sum to k and are differentiable.
    For k = 1 they are softmax. For logits in half precision they are float32.

    ``head(logits, allowed=mask)`` restricts the set to allowed classes. The marginal of every other class is 0. If at
    most k classes are allowed and have a logit above -inf, each of these classes has the marginal 1.

    Args:
        k: size of the set, 1 <= k <= n - 1.
        temperature: positive number by which logits are divided. For a model trained with ``topk_nll`` or
            ``smooth_topk_svm``, use k * tau, see :meth:`of_loss`. To fit the temperature to held-out data, use
            :func:`fit_temperature`.

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

        ``topk_nll`` is tau times the negative log-likelihood under this head. For a loss with several k, the head has
        the largest k.

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


class TopKClassifier(nn.Module):
    """A timm or torchvision classifier followed by a :class:`TopKHead`, with averaging over crops.

    For several crops per image, the marginals are averaged over crops, as in the paper of :class:`TopKHead`. The
    average still sums to k.

    Args:
        model: any classifier that maps [B, C, H, W] to logits [B, n].
        k, temperature: as in :class:`TopKHead`.

    Shape: images [B, C, H, W], or crops [B, crops, C, H, W]; allowed bool [n] or [B, n] -> :class:`TopKOutput`. With
        crops, ``logits`` is the mean over crops, and ``indices`` are the k largest averaged marginals.

    Example:
        >>> model = TopKClassifier(timm.create_model("resnet18", num_classes=100), k=5)
        >>> model(torch.randn(2, 10, 3, 64, 64)).marginals.detach().sum(-1)
        tensor([5.0000, 5.0000])
    """

    model: nn.Module
    head: TopKHead

    def __init__(self, model: nn.Module, k: int, *, temperature: float = 1.0) -> None:
        super().__init__()
        n = num_classes_of(model)
        if k >= n:
            raise ValueError(f"k must be below the number of classes: k = {k}, the model predicts {n}")
        self.model = model
        self.head = TopKHead(k, temperature=temperature)

    def forward(self, images: Tensor, allowed: Tensor | None = None) -> TopKOutput:
        if images.ndim not in (4, 5):
            raise ValueError(f"expected images [B, C, H, W] or crops [B, crops, C, H, W], got {list(images.shape)}")
        if images.ndim == 4:
            return self.head(_main_output(self.model(images)), allowed)
        logits = _main_output(self.model(images.flatten(0, 1))).unflatten(0, images.shape[:2])  # [B, crops, n]
        per_crop = self.head(logits, allowed[:, None] if allowed is not None and allowed.ndim == 2 else allowed)
        marginals = per_crop.marginals.mean(1)
        indices = marginals.topk(self.head.k).indices
        if allowed is not None:
            indices = torch.where(allowed.expand_as(marginals).gather(1, indices), indices, -1)
        return TopKOutput(per_crop.logits.mean(1), marginals, indices)

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, images: Tensor, allowed: Tensor | None = None) -> TopKOutput: ...


def _marginals(logits: Tensor, k: int, temperature: float) -> Tensor:
    """Compute marginals. During an export, use a form with fixed shapes and standard operators."""
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


def _main_output(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the logits of the main head; in training, Inception networks and distilled transformers return several."""
    return output if isinstance(output, Tensor) else output[0]


def fit_temperature(logits: Tensor, target: Tensor, k: int, *, tolerance: float = 1e-3) -> float:
    """Return the temperature that maximizes the likelihood of held-out labels to be in the top-k set.

    It minimizes mean_i -log pi_{y_i}(logits_i / T) over T, on successively finer grids of log T.

    Args:
        logits: held-out scores [N, n], from data that the model was not trained on.
        target: labels [N], int64.
        k: size of the set.
        tolerance: relative error of the temperature.

    Example:
        >>> T = fit_temperature(val_logits, val_labels, k=5)
        >>> head = TopKHead(5, temperature=T)
    """
    logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    if logits.ndim != 2 or not len(logits):
        raise ValueError(f"expected held-out logits [N, n] with N >= 1, got {list(logits.shape)}")
    spread = float(logits.std(-1).mean())
    if not 0.0 < spread < math.inf:
        raise ValueError(f"expected finite logits that differ within a row, got a mean standard deviation of {spread}")

    def nll(log_t: float) -> float:
        t = math.exp(log_t)
        return float(F.softplus(-topk_label_margins(logits, target, k, temperature=t) / t).mean())

    best, step = math.log(spread), math.log(1000.0) / 6  # from 1/1000 to 1000 times the spread
    best = min((best + step * i for i in range(-6, 7)), key=nll)
    while step > tolerance:
        step /= 3
        best = min((best + step * i for i in range(-2, 3)), key=nll)
    return math.exp(best)
