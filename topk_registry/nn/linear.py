"""Classifier and smooth top-k SVM in one, for numbers of classes whose logits would fill the memory."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from topk_registry.losses.base import REDUCTIONS, check_target, checked_weight, label_loss
from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset.chunked.api import TopClasses, linear_label_margins, linear_topk, logits_like


def linear_smooth_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    k: int = 5,
    tau: float = 1.0,
    alpha: float | Tensor = 1.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Smooth top-k SVM of ``F.linear(features, weight, bias)``, in the memory of a chunk of the logits.

    L = tau softplus(alpha / tau - l_y), with l_y the log-odds of the label being in the top-k set of the logits, and
    alpha = 0 for the top-k likelihood. Loss and gradients are those of the loss on the logits; the backward pass
    multiplies features and weight once more.

    Args:
        features: [B, d].
        weight: the classifier's [n, d].
        bias: the classifier's [n], or None.
        target: class indices [B]. Distributions, and with them label smoothing, need the log-odds of every class: two
            further passes over all chunks, and are left to the loss on logits.
        k: size of the set that should hold the label, 1 <= k <= n - 1.
        tau: temperature, positive.
        alpha: margin, not negative: one for all classes, or one a class [n].
        class_weight: one non-negative factor a class [n].
        reduction, ignore_index: as in ``F.cross_entropy``.
        chunk: number of classes at a time; None chooses for speed.

    Returns:
        The loss, a number or [B], in at least single precision. Differentiable once.

    Example:
        >>> features = torch.randn(8, 64, requires_grad=True)
        >>> weight = torch.randn(1_000_000, 64, requires_grad=True)
        >>> linear_smooth_topk(features, weight, None, torch.randint(1_000_000, (8,)), tau=0.1).backward()

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    B, n = len(features), logits_like(features, weight, bias).shape[1]
    _check_options(n, tau, alpha, class_weight, reduction)
    if target.is_floating_point():
        raise ValueError(
            f"target must be class indices [{B}], got {target.dtype}: distributions need the loss on logits"
        )
    check_target(features.new_zeros(()).expand(B, n), target, ignore_index=ignore_index)

    def cost(label: Tensor) -> Tensor:
        margin = linear_label_margins(features, weight, bias, label, k, temperature=k * tau, chunk=chunk)
        wanted = alpha.to(margin)[label] if isinstance(alpha, Tensor) and alpha.ndim else alpha
        loss = soft_hinge(wanted - margin / k, tau)
        return loss if features.dtype == torch.float64 else loss.float()

    return label_loss(cost, target.long(), class_weight, reduction=reduction, ignore_index=ignore_index)


class LinearSmoothTopK(nn.Module):
    """A classifier that is its own loss: ``nn.Linear`` and smooth top-k SVM, for a million classes and more.

    In training ``head(features, target)`` is the loss; to predict, ``head.topk(features)`` gives the k best classes and
    the probability of each to be in the top-k set. Neither makes the logits as a whole.

    Args:
        in_features: length d of a feature vector.
        num_classes: n.
        bias: learn a bias.
        k, tau, alpha, class_weight, reduction, ignore_index, chunk: as in :func:`linear_smooth_topk`.

    Shape: features [B, in_features], target [B] int64 -> the loss. ``weight`` [n, d] and ``bias`` [n] are those of
    ``nn.Linear``, and start as they do.

    Example:
        >>> backbone = timm.create_model("resnet50", num_classes=0)  # images to features
        >>> head = LinearSmoothTopK(backbone.head_hidden_size, 1_000_000, k=5, tau=0.1)
        >>> optimizer = timm.optim.create_optimizer_v2([*backbone.parameters(), *head.parameters()])
        >>> head(backbone(images), target).backward()
        >>> head.topk(backbone(images)).marginals  # [B, 5]

    A model that keeps its classifier gives the same features by
    ``model.forward_head(model.forward_features(images), pre_logits=True)``.
    """

    in_features: int
    num_classes: int
    k: int
    tau: float
    reduction: str
    ignore_index: int
    chunk: int | None
    weight: nn.Parameter
    bias: nn.Parameter | None
    alpha: Tensor
    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        k: int = 5,
        tau: float = 1.0,
        alpha: float | Sequence[float] | Tensor = 1.0,
        class_weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= k < num_classes:
            raise ValueError(f"k must be an integer from 1 to num_classes - 1 = {num_classes - 1}, got {k!r}")
        self.in_features, self.num_classes = in_features, num_classes
        self.k, self.tau, self.reduction, self.ignore_index, self.chunk = k, tau, reduction, ignore_index, chunk
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(self.weight.new_empty(num_classes)) if bias else None)
        margin = torch.as_tensor(alpha, dtype=torch.get_default_dtype()).detach().clone()
        factor = None if class_weight is None else checked_weight(class_weight)
        _check_options(num_classes, tau, margin, factor, reduction)
        if not bool(((margin >= 0) & margin.isfinite()).all()):
            raise ValueError(f"alpha must be one non-negative number, or one a class, got {alpha!r}")
        # options, not state: a checkpoint is that of nn.Linear
        self.register_buffer("alpha", margin.to(device), persistent=False)
        self.register_buffer("class_weight", None if factor is None else factor.to(device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear``: uniform within 1 / sqrt(in_features)."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        return linear_smooth_topk(
            features,
            self.weight,
            self.bias,
            target,
            k=self.k,
            tau=self.tau,
            alpha=self.alpha,
            class_weight=self.class_weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            chunk=self.chunk,
        )

    def topk(self, features: Tensor, *, temperature: float | None = None) -> TopClasses:
        """The k best classes of features [B, d], best first: ``indices``, ``logits`` and ``marginals``, each [B, k].

        Args:
            temperature: of the marginals; k tau, that of the loss, by default.
        """
        temperature = self.k * self.tau if temperature is None else temperature
        return linear_topk(features, self.weight, self.bias, self.k, temperature=temperature, chunk=self.chunk)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}, "
            f"k={self.k}, tau={self.tau:g}, reduction={self.reduction!r}"
        )


def _check_options(n: int, tau: float, alpha: float | Tensor, class_weight: Tensor | None, reduction: str) -> None:
    """Raise unless the options make sense; the values of tensors are not looked at, that would stall a GPU."""
    if not 0.0 < tau < math.inf:
        raise ValueError(f"tau must be positive and finite, got {tau!r}")
    if isinstance(alpha, Tensor):
        if alpha.shape not in ((), (n,)):
            raise ValueError(f"alpha must be one number, or one a class [{n}], got {list(alpha.shape)}")
    elif not 0.0 <= alpha < math.inf:
        raise ValueError(f"alpha must be finite and not negative, got {alpha!r}")
    if class_weight is not None and class_weight.shape != (n,):
        raise ValueError(f"class_weight must be one factor a class [{n}], got {list(class_weight.shape)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
