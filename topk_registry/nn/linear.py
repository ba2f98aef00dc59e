"""Classifier and smooth top-k SVM in one, for numbers of classes whose logits would fill the memory."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry.losses.base import check_target, checked_weight, label_loss
from topk_registry.nn.class_parallel import (
    check_classes,
    check_options,
    loss_of_dtensors,
    own_classes,
    placed,
    spread_loss,
    spread_topk,
)
from topk_registry.ops.distributed import is_distributed
from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset.chunked.api import TopClasses, linear_label_margins, linear_topk, logits_like
from topk_registry.ops.label_mixture import LabelMixture


def linear_smooth_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | LabelMixture,
    *,
    k: int = 5,
    tau: float = 1.0,
    alpha: float | Tensor = 1.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    chunk: int | None = None,
    process_group: Any = None,
    num_classes: int | None = None,
    replicated: bool = False,
    averaged: bool = True,
    sample: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Smooth top-k SVM of ``F.linear(features, weight, bias)``, in the memory of a chunk of the logits.

    L = tau softplus(alpha / tau - l_y), with l_y the log-odds of the label being in the top-k set of the logits, and
    alpha = 0 for the top-k likelihood. Loss and gradients are those of the loss on the logits; the backward pass
    multiplies features and weight once more.

    With ``process_group`` the classes are spread over its ranks. Each rank gives its own rows of the batch, and its own
    classes: ceil(n / ranks) of them, the last ranks what is left. Every rank gets the loss of all rows and must call
    backward on the same number made of it. The gradient of the weight stays where the weight is.

    Args:
        features: [B, d].
        weight: the classifier's [n, d]. It may be a DTensor whose classes are sharded over one dimension of a mesh; the
            ranks along it are the process group. Parts that are replicated over other dimensions get the mean of their
            gradients, as under ``DistributedDataParallel``. Features may then be a DTensor on the same mesh: loss and
            gradients are those of the whole batch, as for any DTensor, and the loss is a DTensor.
        bias: the classifier's [n], or None.
        target: class indices [B], a distribution [B, n] or a :class:`LabelMixture`. Distributions, and with them label
            smoothing, take one more pass over all chunks. Targets get no gradient.
        k: size of the set that should hold the label, 1 <= k <= n - 1.
        tau: temperature, positive.
        alpha: margin, not negative: one for all classes, or one a class [n], of all ranks.
        class_weight: one non-negative factor a class [n], of all ranks.
        reduction, label_smoothing, ignore_index: as in ``F.cross_entropy``. Over ranks ``"mean"`` and ``"sum"`` are
            over the rows of all, and ``"none"`` gives this rank's own.
        chunk: number of classes at a time; None chooses for speed.
        process_group: ranks that hold the classes, such as ``mesh.get_group("classes")``.
        num_classes: n, checked against what the ranks hold; None for their sum.
        replicated: all ranks give the same rows, which then are counted once.
        averaged: the gradients of the backbone are averaged over ranks afterwards, as ``DistributedDataParallel`` and
            FSDP do. The gradient of features is then multiplied by the size of the group, so that the average over all
            data-parallel ranks is the gradient of the loss. False gives the gradient of the loss itself. Without effect
            on ``replicated`` features, where the average of equal gradients is right.
        sample: the chance of each class to take part in a step, as in Partial FC; labels of the batch always do. The
            step then costs that share of time, and of memory for scores. Classes are drawn independently, and scores of
            classes drawn by chance are raised by k tau log(1 / sample). So every elementary symmetric polynomial of the
            odds of other classes is estimated without bias. The loss is a logarithm of ratios of them: loss and
            gradient are biased, less so the more classes are drawn. Needs targets that are labels.
        generator: draws the classes, other ones on each rank.

    Returns:
        The loss, a number or [B], in at least single precision. Differentiable once with distributions or over ranks.

    Raises:
        ValueError: on every rank, where one has bad input or where two disagree on an option.
        RuntimeError: where a rank ended, or did not answer within the timeout of the process group.

    Example:
        >>> features = torch.randn(8, 64, requires_grad=True)
        >>> weight = torch.randn(1_000_000, 64, requires_grad=True)
        >>> linear_smooth_topk(features, weight, None, torch.randint(1_000_000, (8,)), tau=0.1).backward()

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    if is_distributed(weight):
        if process_group is not None:
            raise ValueError("a DTensor weight brings its own ranks, process_group must be None")
        return loss_of_dtensors(
            features, weight, bias, target, k=k, tau=tau, alpha=alpha, class_weight=class_weight, reduction=reduction,
            label_smoothing=label_smoothing, ignore_index=ignore_index, chunk=chunk, num_classes=num_classes,
            replicated=replicated, averaged=averaged, sample=sample, generator=generator,
        )  # fmt: skip
    one_process = process_group is None and sample is None
    if not one_process or isinstance(target, LabelMixture) or target.is_floating_point() or label_smoothing:
        return spread_loss(
            features, weight, bias, target, k=k, tau=tau, alpha=alpha, class_weight=class_weight, reduction=reduction,
            label_smoothing=label_smoothing, ignore_index=ignore_index, chunk=chunk, group=process_group,
            num_classes=num_classes, replicated=replicated, averaged=averaged, sample=sample, generator=generator,
        )  # fmt: skip
    check_options(tau, alpha, reduction, label_smoothing)
    B, n = len(features), logits_like(features, weight, bias).shape[1]
    check_classes(n, alpha, class_weight)
    if num_classes is not None and num_classes != n:
        raise ValueError(f"weight has {n} rows, num_classes is {num_classes}")
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
        k, tau, alpha, class_weight, reduction, label_smoothing, ignore_index, chunk: as in :func:`linear_smooth_topk`.
        process_group: ranks that the classes are spread over; this rank then holds its own rows of weight and bias.
        replicated, averaged, sample: as in :func:`linear_smooth_topk`; nothing is sampled in evaluation mode.

    Shape: features [B, in_features], target [B] int64 or a distribution -> the loss. ``weight`` [n, d] and ``bias`` [n]
    are those of ``nn.Linear``, and start as they do.

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
    label_smoothing: float
    ignore_index: int
    chunk: int | None
    weight: nn.Parameter
    bias: nn.Parameter | None
    alpha: Tensor
    class_weight: Tensor | None
    process_group: Any
    replicated: bool
    averaged: bool
    sample: float | None

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
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        chunk: int | None = None,
        process_group: Any = None,
        replicated: bool = False,
        averaged: bool = True,
        sample: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= k < num_classes:
            raise ValueError(f"k must be an integer from 1 to num_classes - 1 = {num_classes - 1}, got {k!r}")
        self.in_features, self.num_classes = in_features, num_classes
        self.k, self.tau, self.reduction, self.ignore_index, self.chunk = k, tau, reduction, ignore_index, chunk
        self.label_smoothing, self.process_group = float(label_smoothing), process_group
        self.replicated, self.averaged, self.sample = replicated, averaged, sample
        own = num_classes if process_group is None else own_classes(num_classes, process_group)
        self.weight = nn.Parameter(torch.empty(own, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(self.weight.new_empty(own)) if bias else None)
        margin = torch.as_tensor(alpha, dtype=torch.get_default_dtype()).detach().clone()
        factor = None if class_weight is None else checked_weight(class_weight)
        check_options(tau, margin, reduction, label_smoothing)
        check_classes(num_classes, margin, factor)
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

    def forward(self, features: Tensor, target: Tensor | LabelMixture) -> Tensor:
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
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            chunk=self.chunk,
            process_group=self.process_group,
            num_classes=self.num_classes,
            replicated=self.replicated,
            averaged=self.averaged,
            sample=self.sample if self.training else None,
        )

    def topk(self, features: Tensor, *, temperature: float | None = None) -> TopClasses:
        """The k best classes of features [B, d], best first: ``indices``, ``logits`` and ``marginals``, each [B, k].

        Args:
            temperature: of the marginals; k tau, that of the loss, by default.
        """
        temperature = self.k * self.tau if temperature is None else temperature
        group, weight, bias = self.process_group, self.weight, self.bias
        if is_distributed(weight):
            group, weight, bias = placed(weight, bias)
        if group is None:
            return linear_topk(features, weight, bias, self.k, temperature=temperature, chunk=self.chunk)
        return spread_topk(
            features,
            weight,
            bias,
            self.k,
            temperature=temperature,
            chunk=self.chunk,
            group=group,
            num_classes=self.num_classes,
            replicated=self.replicated,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}, "
            f"k={self.k}, tau={self.tau:g}, reduction={self.reduction!r}"
        )
