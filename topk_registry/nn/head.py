"""The prediction head: top-k marginals, as a module and around any classifier."""

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
    """Scores, top-k marginals, and the k classes with the largest scores, best first."""

    logits: Tensor  # [..., n]; -inf for classes that are not allowed
    marginals: Tensor  # [..., n], sums to k
    indices: Tensor  # [..., k], most probable first; -1 beyond the allowed classes


class TopKHead(nn.Module):
    """Compute top-k marginals: the probability that each class is in the top-k set.

    These marginals are pi_i = P(i in S), where S is a random set of k classes, drawn with probability proportional to
    the product of exp(logit / temperature) over its members. They sum to k, and for k = 1 they are softmax. They are
    differentiable. For logits in half precision they are float32.

    ``head(logits, allowed=mask)`` restricts the set to a list of classes: the marginals are those among the allowed
    classes, and 0 for all others. If at most k classes are allowed, or have a logit above -inf, each of them has the
    marginal 1.

    Args:
        k: size of the set, 1 <= k <= n - 1.
        temperature: positive. For a model trained with ``topk_nll`` or ``smooth_topk_svm`` it is k * tau, see
            :meth:`of_loss`; :func:`fit_temperature` fits it to held-out data.

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
        """Return the head of the marginals that a loss trains, by its ``k`` and ``temperature``.

        ``topk_nll`` is tau times the negative log-likelihood under this head. For a loss with several k, it is the head
        of the largest.

        Example:
            >>> TopKHead.of_loss(create_loss("topk_nll", k=5, tau=0.2))
            TopKHead(k=5, temperature=1)
        """
        k, temperature = getattr(loss, "k", None), getattr(loss, "temperature", None)
        if k is None or temperature is None:
            raise ValueError(
                f"expected a loss with a k and a temperature, such as topk_nll or smooth_topk_svm, got "
                f"{type(loss).__name__}: give TopKHead k and temperature themselves"
            )
        return cls(k, temperature=temperature)

    def forward(self, logits: Tensor, allowed: Tensor | None = None) -> TopKOutput:
        if allowed is not None:
            _check_allowed(allowed, logits)
            logits = logits.masked_fill(~allowed, -torch.inf)
        # ranked by logits: marginals have the same order, but saturate at 1 and would tie there
        top, indices = logits.topk(self.k)
        if allowed is not None:
            indices = torch.where(top == -torch.inf, -1, indices)
        return TopKOutput(logits, _marginals(logits, self.k, self.temperature), indices)

    if TYPE_CHECKING:  # torch declares that a call returns anything

        def __call__(self, logits: Tensor, allowed: Tensor | None = None) -> TopKOutput: ...

    def extra_repr(self) -> str:
        return f"k={self.k}, temperature={self.temperature:g}"


class TopKClassifier(nn.Module):
    """A timm or torchvision classifier with a :class:`TopKHead`; it averages over crops of an image.

    With several crops of an image their marginals are averaged, as in the paper. The average still sums to k.

    Args:
        model: any classifier that maps [B, C, H, W] to logits [B, n].
        k, temperature: as in :class:`TopKHead`.

    Shape: images [B, C, H, W], or crops [B, crops, C, H, W]; allowed bool [n] or [B, n] -> :class:`TopKOutput`. With
    crops, ``logits`` is their mean and ``indices`` orders the averaged marginals.

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

    if TYPE_CHECKING:  # torch declares that a call returns anything

        def __call__(self, images: Tensor, allowed: Tensor | None = None) -> TopKOutput: ...


def _marginals(logits: Tensor, k: int, temperature: float) -> Tensor:
    """Compute the marginals; in an export, in a form of fixed shapes and standard operations."""
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
    """Return the main head's logits; in training, Inception networks and distilled transformers have several heads."""
    return output if isinstance(output, Tensor) else output[0]


def fit_temperature(logits: Tensor, target: Tensor, k: int, *, tolerance: float = 1e-3) -> float:
    """Return the temperature at which held-out labels are most likely to be in the top-k set.

    Minimize mean_i -log pi_{y_i}(logits_i / T) over log T, by grids that close in on the minimum.

    Args:
        logits: held-out scores [N, n], from data that the model was not trained on.
        target: their labels [N], int64.
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

    best, step = math.log(spread), math.log(1000.0) / 6  # from a thousandth to a thousand times the spread
    best = min((best + step * i for i in range(-6, 7)), key=nll)
    while step > tolerance:
        step /= 3
        best = min((best + step * i for i in range(-2, 3)), key=nll)
    return math.exp(best)
