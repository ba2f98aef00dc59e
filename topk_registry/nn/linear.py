"""A linear classifier with the smooth top-k SVM loss, for so many classes that their logits do not fit in memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from topk_registry.checks import choice, integer, number, shown
from topk_registry.ops.backend import is_readable
from topk_registry.ops.distributed import Group, OwnRows, agreed, gather_rows, outside_graphs
from topk_registry.ops.ksubset import linear as chunked
from topk_registry.ops.ksubset.api import topk_marginals
from topk_registry.ops.ksubset.chunks import classes_per_rank, first_class
from topk_registry.ops.ksubset.graph import soft_hinge
from topk_registry.ops.ksubset.linear import Problem, TopClasses
from topk_registry.ops.losses import smooth_topk
from topk_registry.ops.masses import REDUCTIONS, LabelMixture, Masses


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
) -> Tensor:
    """Compute the smooth top-k SVM loss of the logits ``F.linear(features, weight, bias)``.

    If there are more than ``chunk`` classes (and at least 2k + 4), or with ``process_group``, the logits [B, n] are
    never in memory at once. Instead, the logits of ``chunk`` classes are computed at a time, and again in the backward
    pass. Loss and gradients do not depend on ``chunk``. The loss of a row with the label y is

        L = tau softplus(alpha / tau - l_y),    l_y = log(p / (1 - p)),

    where p is the probability that a random set of k classes contains y. The probability of a set is proportional to
    the product of exp(logit / (k tau)) over the classes in the set. If alpha = 0, then L = -tau log(p).

    With ``process_group``, the classes and the batch are divided among the ranks of the group. Each rank passes the
    features and targets of its own rows, and the weight and bias of its own classes. A rank has ceil(n / ranks)
    classes, but the last ranks may have fewer. k must be below n / 2, targets must be class indices, and
    ``label_smoothing`` must be 0. Every rank must call ``backward``. The gradient with respect to the features is
    multiplied by the number of ranks. This factor cancels, because ``DistributedDataParallel`` averages the gradients
    of the backbone over ranks.

    Args:
        features: [B, d].
        weight: [n, d]. With ``process_group``: the rows of this rank's classes.
        bias: [n], or None. With ``process_group``: the entries of this rank's classes.
        target: class indices [B], probabilities [B, n] or a :class:`LabelMixture`. Probabilities, mixtures and label
            smoothing need one more pass over all chunks. Label smoothing together with ``class_weight`` needs memory
            for a tensor [B, n].
        k: number of classes in the random set, 1 <= k <= n - 1.
        tau: smoothing temperature, positive.
        alpha: required margin, at least 0: one number, or one number for each of the n classes of all ranks.
        class_weight: one non-negative factor for each of the n classes of all ranks.
        reduction, label_smoothing, ignore_index: as in ``F.cross_entropy``. With ``process_group``, ``"mean"`` and
            ``"sum"`` include the rows of all ranks, and ``"none"`` returns the losses of this rank's rows.
        chunk: number of classes per chunk. None: a number that is fast on the device.
        process_group: the ranks that share the classes, such as ``device_mesh.get_group("classes")``.

    Returns:
        The loss: [], or [B] for ``"none"``. A loss that was computed in chunks has no second derivatives.

    Raises:
        ValueError: an argument is invalid, or two ranks pass different options. In both cases, every rank raises.

    Example:
        >>> features = torch.randn(8, 64, requires_grad=True)
        >>> weight = torch.randn(1_000_000, 64, requires_grad=True)
        >>> linear_smooth_topk(features, weight, None, torch.randint(1_000_000, (8,)), tau=0.1).backward()

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    alpha = torch.as_tensor(alpha, device=features.device).detach()

    def masses_of(target: Tensor | LabelMixture, n: int, x: Tensor) -> Masses:
        if alpha.shape not in ((), (n,)) or (is_readable(alpha) and not bool((alpha >= 0).all())):
            raise ValueError(f"alpha must be at least 0, one number or one per class [{n}], got {shown(alpha)}")
        options = {"weight": class_weight, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
        return Masses.of(x.new_zeros(()).expand(len(x), n), target, reduction=reduction, **options)

    def losses_of(x: Tensor, target: Tensor | LabelMixture, first: int, n: int) -> Tensor:
        masses = masses_of(target, n, x)
        p = _problem(x, k, k * tau, chunked.chunk_size(x, chunk), first, process_group)
        return masses.nan_without_rows(_losses(masses.usable(x), weight, bias, masses, alpha, tau, p))

    def check() -> Mapping[str, float]:
        facts = _check_layer(features, weight, bias, k, chunk)
        number(tau, "tau", above=0)
        choice(reduction, "reduction", REDUCTIONS)
        number(label_smoothing, "label_smoothing", at_least=0, at_most=1)
        facts |= {"tau": tau, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
        if process_group is None:
            return facts
        shape = None if isinstance(target, LabelMixture) or target.is_floating_point() else target.shape
        if shape != features.shape[:1] or label_smoothing:
            raise ValueError(
                f"with a process_group, targets must be class indices [{len(features)}], without label smoothing"
            )
        facts |= {"alpha": -1.0 if alpha.ndim else alpha.item(), "class_weight": class_weight is not None}
        return facts | {"reduction": REDUCTIONS.index(reduction)}

    if process_group is None:
        check()
        if not _needs_chunks(features, weight, k, chunk):
            masses = masses_of(target, len(weight), features)
            logits = F.linear(masses.usable(features), weight, bias)
            losses = masses.nan_without_rows(smooth_topk(logits, masses, k=k, tau=tau, alpha=alpha))
            return _reduced(losses, reduction)
        return _in_chunks(losses_of, features, target, len(weight), reduction)
    return _over_ranks(losses_of, features, target, check, k, reduction, process_group)


@outside_graphs
def linear_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    process_group: Any = None,
) -> TopClasses:
    """Return the k classes with the largest logits. The logits are ``F.linear(features, weight, bias)``.

    The result has ``indices``, ``logits`` and ``marginals`` [B, k], in descending order and not differentiable. The
    marginal of a class is the probability that a random set of k classes contains the class. The probability of a set
    is proportional to the product of exp(logit / temperature) over the classes in the set. The other arguments are as
    in :func:`linear_smooth_topk`. With ``process_group``, the result has only the rows of this rank.

    Example:
        >>> linear_topk(torch.eye(3), torch.eye(3), None, 1).marginals.T
        tensor([[0.5761, 0.5761, 0.5761]])
    """

    def check() -> Mapping[str, float]:
        facts = _check_layer(features, weight, bias, k, chunk)
        return facts | {"temperature": number(temperature, "temperature", above=0)}

    features, size = features.detach(), chunked.chunk_size(features, chunk)
    if process_group is not None:
        sizes, first, _ = _agree(check, k, process_group)
        x = gather_rows(features, sizes, process_group)
        best = chunked.linear_topk_classes(x, weight, bias, _problem(x, k, temperature, size, first, process_group))
        return TopClasses(*(part.split(sizes)[dist.get_rank(process_group)] for part in best))
    check()
    if _needs_chunks(features, weight, k, chunk):
        return chunked.linear_topk_classes(features, weight, bias, _problem(features, k, temperature, size))
    with torch.no_grad():
        logits = F.linear(features, weight, bias)
        marginals = topk_marginals(logits, k, temperature=temperature)
        top, indices = logits.topk(k)
        return TopClasses(indices, top, marginals.gather(1, indices))


def _needs_chunks(features: Tensor, weight: Tensor, k: int, chunk: int | None) -> bool:
    return len(weight) > chunked.chunk_size(features, chunk) and len(weight) >= chunked.min_classes(k)


@outside_graphs
def _in_chunks(losses_of, features, target, n, reduction) -> Tensor:
    # the sum is outside of compiled graphs too: a graph with the losses as input would read losses.grad, which warns
    return _reduced(losses_of(features, target, 0, n), reduction)


@outside_graphs
def _over_ranks(losses_of, features, target, check, k, reduction, group) -> Tensor:
    sizes, first, n = _agree(check, k, group)
    x = gather_rows(features, sizes, group)
    if x.requires_grad:
        x.register_hook(lambda g: g * len(sizes))
    losses = losses_of(x, gather_rows(target.long(), sizes, group), first, n)
    result = OwnRows.apply(losses, sizes, group) if reduction == "none" else _reduced(losses, reduction)
    assert isinstance(result, Tensor)
    return result


def _losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, masses: Masses, alpha: Tensor, tau: float, p: Problem
) -> Tensor:
    labels, shares = masses.labels, masses.shares
    if labels is None or shares is None or labels.shape[1] != 1 or masses.even is not None:
        mass = partial(_mass, masses)
        return chunked.linear_expected_hinge(x, weight, bias, mass, alpha, tau, p).to(p.wide)
    label, share = labels[:, 0], shares[:, 0].double()
    margin = chunked.linear_label_margins(x, weight, bias, label, p)
    gap = (alpha[label] if alpha.ndim else alpha).double()
    losses = soft_hinge(gap - margin / p.k, tau)
    return torch.where(share == 0, 0.0, share * losses).to(p.wide)


def _mass(masses: Masses, s: Tensor, first: int) -> Tensor:
    # the loss of row i is sum_c q_ic * (loss for label c); return q for the m classes from ``first`` on
    m = s.shape[1]
    if masses.dense is not None:
        return masses.dense[:, first : first + m].to(s)
    assert masses.labels is not None
    assert masses.shares is not None
    q = torch.zeros_like(s) if masses.even is None else masses.even[:, None].to(s).expand_as(s)
    local = masses.labels - first
    place = torch.where((local >= 0) & (local < m), local, m)  # labels of other chunks go to an extra column
    return F.pad(q, (0, 1)).scatter_add(1, place, masses.shares.to(s))[:, :m]


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    # for "mean", each loss is already divided by the denominator of the mean; without rows, the mean is NaN
    return losses.mean() if reduction == "mean" and not len(losses) else losses.sum()


def _agree(check: Callable[[], Mapping[str, float]], k: int, group: Group) -> tuple[list[int], int, int]:
    # returns (number of rows of each rank, index of the first class of this rank, number of classes of all ranks)
    of_ranks = agreed(check, group, may_differ=("number of rows", "classes"))
    first, n = first_class(of_ranks["classes"], group)
    if n <= 2 * k:
        raise ValueError(f"with a process_group, k must be below half of the number of classes: k = {k}, n = {n}")
    return [int(rows) for rows in of_ranks["number of rows"]], first, n


def _problem(x: Tensor, k: int, theta: float, chunk: int, first: int = 0, group: Group = None) -> Problem:
    if k > chunked.MAX_K:
        raise ValueError(f"if classes are processed in chunks, k must be at most {chunked.MAX_K}, got {k}")
    dtype = chunked.product_dtype(x)
    smallest = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).tiny
    return Problem(k, max(theta, smallest), chunk, dtype, first, group)


def _check_layer(features: Tensor, weight: Tensor, bias: Tensor | None, k: int, chunk: int | None) -> dict[str, float]:
    """Raise a ValueError unless the arguments fit together. Return the sizes and k as a dictionary."""
    shapes = [None if t is None else list(t.shape) for t in (features, weight, bias)]
    fits = features.ndim == 2 and weight.ndim == 2 and features.shape[1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"expected features [B, d], weight [n, d] and bias [n] or None, got {shapes}")
    dtypes = {chunked.product_dtype(t) for t in (features, weight, bias) if t is not None}
    if len(dtypes) > 1 or not features.is_floating_point():
        raise ValueError(f"features, weight and bias must have one floating-point dtype outside autocast, got {dtypes}")
    if chunk is not None:
        integer(chunk, "chunk", at_least=1)
    facts: dict[str, float] = {"number of rows": len(features), "features": features.shape[1], "classes": len(weight)}
    return facts | {"k": integer(k, "k", at_least=1)}


class LinearSmoothTopK(nn.Module):
    """A linear classifier and the smooth top-k SVM loss in one module, for a million classes or more.

    ``head(features, target)`` returns the training loss. ``head.topk(features)`` returns the k classes with the largest
    logits. If there are more than ``chunk`` classes (and at least 2k + 4), neither call stores all logits at once.

    Args:
        in_features: length d of a feature vector.
        num_classes: number of classes n.
        bias: whether the classifier has a bias.
        k, tau, alpha, class_weight, reduction, label_smoothing, ignore_index, chunk: as in
            :func:`linear_smooth_topk`.
        process_group: ranks that share the classes. Each rank then stores only the rows of ``weight`` and ``bias`` for
            its own classes.

    Shape: features [B, d], target as in :func:`linear_smooth_topk` -> loss [] or [B]. The parameters ``weight`` [n, d]
    and ``bias`` [n] have the same names as in ``nn.Linear``.

    Example:
        >>> backbone = timm.create_model("resnet50", num_classes=0)  # images to features
        >>> head = LinearSmoothTopK(backbone.head_hidden_size, 1_000_000, k=5, tau=0.1)  # doctest: +SKIP
        >>> optimizer = timm.optim.create_optimizer_v2([*backbone.parameters(), *head.parameters()])  # doctest: +SKIP
        >>> head(backbone(images), target).backward()  # doctest: +SKIP
        >>> head.topk(backbone(images)).marginals  # doctest: +SKIP

    If the model has its own classifier, compute the features with
    ``model.forward_head(model.forward_features(images), pre_logits=True)``.
    """

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
        tau: float = 0.1,
        alpha: float | Sequence[float] | Tensor = 1.0,
        class_weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        chunk: int | None = None,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= integer(k, "k") < num_classes:
            raise ValueError(f"k must be an integer from 1 to num_classes - 1 = {num_classes - 1}, got {k!r}")
        self.in_features = in_features
        self.num_classes = num_classes
        self.k = k
        self.tau = number(tau, "tau", above=0)
        self.reduction = choice(reduction, "reduction", REDUCTIONS)
        self.label_smoothing = number(label_smoothing, "label_smoothing", at_least=0, at_most=1)
        self.chunk = chunk if chunk is None else integer(chunk, "chunk", at_least=1)
        self.ignore_index, self.process_group = ignore_index, process_group
        own = num_classes
        if process_group is not None:
            own = classes_per_rank(num_classes, dist.get_world_size(process_group))[dist.get_rank(process_group)]
        self.weight = nn.Parameter(torch.empty(own, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(self.weight.new_empty(own)) if bias else None)
        for name, values in (("alpha", alpha), ("class_weight", class_weight)):
            tensor = None if values is None else torch.as_tensor(values, device=device).detach().clone()
            if tensor is not None:
                shapes = [(num_classes,)] + [()] * (name == "alpha")
                if tensor.shape not in shapes or not bool((tensor >= 0).all()):
                    raise ValueError(f"{name} must be non-negative, one per class [{num_classes}], got {values!r}")
            # the state_dict omits these buffers, so that checkpoints are compatible with nn.Linear
            self.register_buffer(name, tensor, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias from the uniform distribution on [-b, b] with b = 1 / sqrt(d), as ``nn.Linear`` does."""
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
        )

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, features: Tensor, target: Tensor | LabelMixture) -> Tensor: ...

    def topk(self, features: Tensor, *, temperature: float | None = None) -> TopClasses:
        """Return the ``indices``, ``logits`` and ``marginals`` of the k classes with the largest logits: each [B, k].

        A marginal is P(class in S) for a random set S of k classes. Default of ``temperature``: k * tau of the loss.
        """
        return linear_topk(
            features,
            self.weight,
            self.bias,
            self.k,
            temperature=self.k * self.tau if temperature is None else temperature,
            chunk=self.chunk,
            process_group=self.process_group,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}, "
            f"k={self.k}, tau={self.tau:g}, reduction={self.reduction!r}"
        )
