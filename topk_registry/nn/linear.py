"""Linear classifier and smooth top-k SVM in one, for more classes than there is memory for their logits."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from topk_registry.losses.options import KeepsNumbers
from topk_registry.nn.chunked_update.update import update_of
from topk_registry.nn.class_parallel import (
    check_classes,
    check_options,
    loss_of_dtensors,
    own_classes,
    placed,
    spread_loss,
    spread_topk,
)
from topk_registry.ops.constant import fixed_number
from topk_registry.ops.distributed import is_distributed
from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset.chunked.api import TopClasses, linear_label_margins, linear_topk, logits_like
from topk_registry.ops.targets.checks import check_target, checked_weight
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Masses
from topk_registry.ops.values import numbers


def linear_smooth_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | LabelMixture,
    *,
    k: int = 5,
    tau: float = 0.1,
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
    """Compute the smooth top-k SVM of ``F.linear(features, weight, bias)``, a chunk of the classes at a time.

    L = tau softplus(alpha / tau - l_y), where l_y is the log-odds of the label being in the top-k set of the logits.
    With alpha = 0 it is the top-k likelihood. Loss and gradients are the same as from all logits at once. The backward
    pass multiplies features and weight a second time instead of keeping logits.

    With ``process_group`` the classes are spread over its ranks. Each rank passes its own rows of the batch, and the
    weight of its own classes: ceil(n / ranks) of them, fewer on the last ranks. Every rank returns the loss of all
    rows. Every rank must call ``backward``, on the loss or on the same function of it. The gradient of the weight stays
    on the rank that holds the weight.

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
        alpha: required gap, not negative: the loss fades once the label is k times as far ahead. One number, or one for
            each class [n] of all ranks.
        class_weight: one non-negative factor for each class [n] of all ranks.
        reduction, label_smoothing, ignore_index: as in ``F.cross_entropy``. Over ranks ``"mean"`` and ``"sum"`` are
            over the rows of all, and ``"none"`` gives this rank's own.
        chunk: number of classes at a time; None chooses for speed.
        process_group: the ranks that hold the classes, such as ``mesh.get_group("classes")``.
        num_classes: n, checked against what the ranks hold; None for their sum.
        replicated: all ranks pass the same rows, which are then counted once.
        averaged: whether the backbone's gradients are averaged over ranks afterwards, as ``DistributedDataParallel``
            and FSDP do. If so, the gradient of features is multiplied by the size of the group, and the average over
            all data-parallel ranks is the gradient of the loss. False gives the gradient of the loss itself. Has no
            effect on ``replicated`` features, whose gradients are equal on all ranks.
        sample: the probability of each class to take part in a step, as in Partial FC. Labels of the batch always take
            part. A step then costs that share of the time, and of the memory for scores. The other
            classes are drawn independently, and scores of those drawn are raised by k tau log(1 / sample). This
            estimates every elementary symmetric polynomial of the other classes' odds without bias. The loss is a
            logarithm of ratios of such polynomials, so loss and gradient are biased, less so the more classes are
            drawn. Targets must be labels.
        generator: draws the classes; each rank draws others.

    Returns:
        The loss, a number or [B], in float32 or float64. Over ranks or with distributions it is differentiable once.

    Raises:
        ValueError: on every rank, if one has bad input or two disagree on an option.
        RuntimeError: if a rank ended, or did not answer within the timeout of the process group.

    Example:
        >>> features = torch.randn(8, 64, requires_grad=True)
        >>> weight = torch.randn(1_000_000, 64, requires_grad=True)
        >>> linear_smooth_topk(features, weight, None, torch.randint(1_000_000, (8,)), tau=0.1).backward()

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    if is_distributed(weight):
        if process_group is not None:
            raise ValueError("process_group must be None for a DTensor weight, whose mesh names the ranks")
        return loss_of_dtensors(
            features, weight, bias, target, k=k, tau=tau, alpha=alpha, class_weight=class_weight, reduction=reduction,
            label_smoothing=label_smoothing, ignore_index=ignore_index, chunk=chunk, num_classes=num_classes,
            replicated=replicated, averaged=averaged, sample=sample, generator=generator,
        )  # fmt: skip
    update = update_of(weight, bias)
    one_process = process_group is None and sample is None and update is None
    if not one_process or isinstance(target, LabelMixture) or target.is_floating_point() or label_smoothing:
        return spread_loss(
            features, weight, bias, target, k=k, tau=tau, alpha=alpha, class_weight=class_weight, reduction=reduction,
            label_smoothing=label_smoothing, ignore_index=ignore_index, chunk=chunk, group=process_group,
            num_classes=num_classes, replicated=replicated, averaged=averaged, sample=sample, generator=generator,
            update=update,
        )  # fmt: skip
    tau, label_smoothing = fixed_number(tau), fixed_number(label_smoothing)
    check_options(tau, alpha, reduction, label_smoothing)
    B, n = len(features), logits_like(features, weight, bias).shape[1]
    check_classes(n, alpha, class_weight)
    if num_classes is not None and num_classes != n:
        raise ValueError(f"weight has {n} rows, num_classes is {num_classes}")
    seen = check_target(features.new_zeros(()).expand(B, n), target, ignore_index=ignore_index)
    masses = Masses.of(target, n, weight=class_weight, ignore_index=ignore_index, seen=seen)
    label = masses.labels
    assert label is not None, "other targets are spread_loss's"
    x = masses.counted(features)
    margin = linear_label_margins(x, weight, bias, label, k, temperature=k * tau, chunk=chunk)
    wanted = alpha.to(margin)[label] if isinstance(alpha, Tensor) and alpha.ndim else alpha
    loss = soft_hinge(wanted - margin / k, tau)
    loss = loss if class_weight is None else masses.weighted(loss)
    return masses.reduced(loss if features.dtype == torch.float64 else loss.float(), reduction)


class LinearSmoothTopK(KeepsNumbers):
    """``nn.Linear`` and smooth top-k SVM in one module, for a million classes and more.

    ``head(features, target)`` returns the loss to train with. ``head.topk(features)`` predicts the k best classes, each
    with its probability of being in the top-k set. Neither holds the logits of all classes at once.

    Args:
        in_features: length d of a feature vector.
        num_classes: n.
        bias: learn a bias.
        k, tau, alpha, class_weight, reduction, label_smoothing, ignore_index, chunk: as in :func:`linear_smooth_topk`.
        process_group: ranks that the classes are spread over; each holds its own rows of weight and bias.
        replicated, averaged, sample: as in :func:`linear_smooth_topk`; evaluation mode takes all classes.

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
        tau: float = 0.1,
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
        gap = numbers(alpha, "alpha", at_least=0, or_one=True)
        factor = None if class_weight is None else checked_weight(class_weight)
        check_options(tau, gap, reduction, label_smoothing)
        check_classes(num_classes, gap, factor)
        # not in the state_dict, so that a checkpoint is that of nn.Linear
        self.register_buffer("alpha", gap.to(device), persistent=False)
        self.register_buffer("class_weight", None if factor is None else factor.to(device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``nn.Linear`` does, uniformly within 1 / sqrt(in_features) of zero."""
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

    if TYPE_CHECKING:  # torch declares that a call gives anything

        def __call__(self, features: Tensor, target: Tensor | LabelMixture) -> Tensor: ...

    def topk(self, features: Tensor, *, temperature: float | None = None) -> TopClasses:
        """Return ``indices``, ``logits`` and ``marginals`` of the k best classes, best first, each [B, k].

        Args:
            temperature: divides the logits for the marginals; by default k tau, as in the loss.
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
