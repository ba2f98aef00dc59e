"""A linear classifier with a loss whose cost is independent of the number of classes. README.md has the formulas."""

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from topk_registry.checks import choice, integer, number
from topk_registry.nn.spherical.factors import MAX_CONDITION, Batch, FactoredWeight, joined, over_ranks
from topk_registry.nn.spherical.links import SQUARED_ERROR, loss_per_sample, resolve
from topk_registry.ops.ksubset import chunks
from topk_registry.ops.ksubset.linear import TopClasses
from topk_registry.ops.masses import REDUCTIONS, LabelMixture, Masses

CHUNK = 1 << 20  # number of scores per chunk
FOLD_EVERY = 10_000  # after this number of steps, the small matrices are recomputed from the weight
MAX_PENDING = 1000  # after this number of backward passes without a step, the layer warns
Target = Tensor | LabelMixture | tuple[Tensor, Tensor]


class SphericalLinear(nn.Module):
    """A linear classifier with a spherical loss. The time of a training step does not depend on the number of classes.

    A spherical loss depends only on the label's score, the sum of all scores, and the sum of the squares of all scores.
    Therefore the layer need not compute the scores of the other classes, or the gradient of the whole weight [n, d].

    ``layer(features, target)`` returns the loss. ``loss.backward()`` computes the exact gradient with respect to the
    features. Then ``layer.step(lr)`` or :class:`SphericalSGD` changes the weight exactly as SGD would, in O(d^2) per
    sample. Train the backbone with a separate optimizer. No other optimizer can train this layer, because the weight
    has no ``grad``.

    Limitation: if n is much larger than d, the probabilities of correct classes stay small (README.md, section 6).

    Args:
        in_features: length d of a feature vector.
        num_classes: number of classes n.
        bias: whether the layer has a bias. The bias is the weight of an additional feature that is always 1.
        loss: name of a registered spherical loss, or an instance of such a loss, or ``"mse"``. ``"mse"`` is the squared
            error between the n scores and a target vector [n], summed over all n classes. The target vector is 1 at
            the label and 0 elsewhere. If the target is a pair (see Shape), the weight of each label replaces the 1,
            and the weights of equal labels are added.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a row with this label has loss 0 and gradient 0, and does not count in the mean.
        dtype: dtype of the stored [n, d] matrix, float32 or float64. The other matrices, [d, d], are always float64.

    Shape: features [B, d], target -> loss [] or [B]. The target consists of class indices [B], or it is a
    :class:`LabelMixture` or a pair (class indices [B, K], weights [B, K]). With K labels, the loss of a row is the sum
    over these labels of weight * (loss for this label), except for ``"mse"``.

    Example:
        >>> layer = SphericalLinear(16, 1000, loss="mse")
        >>> features = torch.randn(4, 16, requires_grad=True)
        >>> layer(features, torch.tensor([1, 2, 3, 4])).backward()  # features.grad is set
        >>> layer.step(lr=0.001)

    Reference:
        Vincent, de Brebisson, Bouchard. Efficient Exact Gradient Update for training Deep Networks with Very Large
        Sparse Targets. NIPS 2015. de Brebisson, Vincent. An Exploration of Softmax Alternatives Belonging to the
        Spherical Loss Family. ICLR 2016.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        loss: str | nn.Module = SQUARED_ERROR,
        reduction: str = "mean",
        ignore_index: int = -100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        integer(in_features, "in_features", at_least=1)
        integer(num_classes, "num_classes", at_least=2)
        choice(reduction, "reduction", REDUCTIONS)
        weight = torch.empty(num_classes, in_features + bias, device=device, dtype=dtype)
        if weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32 or float64, got {weight.dtype}: steps are lost in half precision")
        self.in_features = in_features
        self.num_classes = num_classes
        self.bias = bool(bias)
        self.reduction, self.ignore_index = reduction, int(ignore_index)
        self.loss = resolve(loss)
        bound = 1 / math.sqrt(in_features)
        self.factors = FactoredWeight(nn.init.uniform_(weight, -bound, bound))
        self._pending: list[Batch] = []
        self._version = 0  # number of steps

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "SphericalLinear":
        """Return a layer with the weight and bias of ``linear``. ``options`` are passed to the constructor."""
        weight = linear.weight.detach()
        if linear.bias is not None:
            weight = torch.cat((weight, linear.bias.detach()[:, None]), 1)
        given = {"device": weight.device, "dtype": weight.dtype} | options
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, **given)
        with torch.no_grad():
            layer.factors.V.copy_(weight)
            layer.factors.fold()
        return layer

    def forward(self, features: Tensor, target: Target) -> Tensor:
        """Return the loss, computed in double precision and converted to the dtype of the features."""
        rows, labels, weights, divisor = self._targets(features, target)
        kept = features if rows is None else features[rows]
        with torch.autocast(features.device.type, enabled=False):
            # this input requires a gradient, so a backward pass is possible even if the features require no gradient
            anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
            losses = _Losses.apply(kept, labels, weights, self, anchor)
        if self.reduction == "none":
            losses = losses if rows is None else losses.new_zeros(len(features)).index_copy(0, rows, losses)
            return losses.to(features.dtype)
        total = losses.sum()
        return (total if self.reduction == "sum" else total / divisor).to(features.dtype)

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, features: Tensor, target: Target) -> Tensor: ...

    @torch.no_grad()
    def step(
        self, lr: float, *, weight_decay: float = 0.0, max_norm: float | None = None, grad_scale: float = 1.0
    ) -> None:
        """Change the weight [n, d] exactly as ``torch.optim.SGD(lr=lr, weight_decay=weight_decay)`` would.

        The gradient is the sum over all backward passes since the last step. If there was no backward pass, the method
        warns and does not change the weight. In a process group, all ranks must call this method, and the gradient is
        the mean over ranks, as with ``DistributedDataParallel``.

        Args:
            lr: learning rate.
            weight_decay: factor of the L2 decay.
            max_norm: largest norm of the gradient [n, d]. A larger gradient is scaled down, as by ``clip_grad_norm_``.
            grad_scale: number by which the gradient is divided, such as the scale of a ``GradScaler``.

        Raises:
            SingularStepError: the new weight would not be finite. The weight is unchanged.
        """
        check_step(lr, weight_decay, max_norm)
        batch = self._batch(grad_scale)
        if batch is None:
            warnings.warn(
                "SphericalLinear.step(): no backward pass since the last step or zero_grad(), the weight is unchanged",
                stacklevel=2,
            )
            return
        if max_norm is not None:
            batch = batch.scaled((max_norm / (self.factors.gradient_norm(batch) + 1e-6)).clamp(max=1.0).item())
        self.factors.update(batch, lr, weight_decay)
        self._pending, self._version = [], self._version + 1
        if self.factors.condition() > MAX_CONDITION or int(self.factors.steps) % FOLD_EVERY == 0:
            self.factors.fold()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Return the norm of the gradient for the next step. In a process group, all ranks must call this method."""
        batch = self._batch(1.0)
        return 0.0 if batch is None else float(self.factors.gradient_norm(batch))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the weight gradients of all backward passes since the last step."""
        super().zero_grad(set_to_none)
        self._pending = []

    @torch.no_grad()
    def topk(self, features: Tensor, k: int, *, chunk: int | None = None) -> TopClasses:
        """Return the k classes with the largest logits for features [B, d], in descending order.

        Args:
            k: number of classes, 1 <= k <= n - 1.
            chunk: number of classes whose scores are computed at once. None: a number that limits memory.

        Returns:
            ``indices``, ``logits`` and ``marginals``, each [B, k]. A logit is the logarithm of the unnormalized
            probability that the loss gives to the class. For ``"mse"``, a logit is the score. A marginal is
            P(class in S) for a random set S of k classes, as in :class:`TopKHead` with these logits and temperature 1.
        """
        if not 1 <= integer(k, "k") < self.num_classes:
            raise ValueError(f"k must be an integer from 1 to n - 1 = {self.num_classes - 1}, got {k!r}")
        H, V = self._rows(features), self.factors.V
        size = max(CHUNK // max(len(H), 1), 1024) if chunk is None else integer(chunk, "chunk", at_least=1)
        size, states = max(size, 2 * k + 3), []
        HU, shift = (H @ self.factors.U.T).to(V.dtype), (H @ self.factors.omega).to(V.dtype)[:, None]
        for first in range(0, self.num_classes, size):
            scores = HU @ V[first : first + size].T + shift
            logits = scores if self.loss is None else self.loss.predictive_logits(scores)
            states.append(chunks.summarize(logits, k + 1, 1.0, first))
        state = chunks.merge(states, 1.0)
        marginals = torch.sigmoid(chunks.top_margins(state, 1.0))
        best = state.top[:, :k], marginals
        return TopClasses(state.classes[:, :k], *(part.to(features.dtype) for part in best))

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return an ``nn.Linear`` that computes the same scores as this layer.

        The probabilities of the classes are ``layer.loss.predictive_logits(scores).softmax(-1)``, except for ``"mse"``.
        """
        W = self.factors.dense()
        linear = nn.Linear(self.in_features, self.num_classes, self.bias, device=W.device, dtype=W.dtype)
        linear.weight.copy_(W[:, : self.in_features])
        if self.bias:
            linear.bias.copy_(W[:, -1])
        return linear

    def extra_repr(self) -> str:
        loss = SQUARED_ERROR if self.loss is None else type(self.loss).__name__
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias}, loss={loss}, "
            f"reduction={self.reduction!r}"
        )

    def _rows(self, features: Tensor) -> Tensor:
        if features.ndim != 2 or features.shape[1] != self.in_features or not features.is_floating_point():
            raise ValueError(
                f"features must be floating point [B, {self.in_features}], got {features.dtype} {list(features.shape)}"
            )
        H = features.double()
        return torch.cat((H, H.new_ones(len(H), 1)), 1) if self.bias else H

    def _targets(
        self, features: Tensor, target: Target
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | int]:  # fmt: skip
        """Return (rows, labels [m, K], weights [m, K], divisor of the mean) for the m samples that are not ignored.

        ``rows`` are the indices of these samples, or None for all samples.
        """
        if isinstance(target, tuple) and not isinstance(target, LabelMixture):
            target = LabelMixture(*target)
        scores = features.new_zeros(()).expand(len(features), self.num_classes)  # values are not read
        weight = getattr(self.loss, "weight", None)
        masses = Masses.of(scores, target, weight=weight, ignore_index=self.ignore_index, reduction="none")
        if masses.labels is None or masses.shares is None or masses.even is not None:
            raise ValueError("target must be class indices or K weighted labels: dense distributions are not supported")
        labels, weights = masses.labels, masses.shares.double()
        if isinstance(target, LabelMixture):
            return None, labels, weights, len(labels)
        if masses.counts is None or bool(masses.counts.all()):
            return None, labels, weights, weights.sum()
        return masses.counts.nonzero()[:, 0], labels[masses.counts], weights[masses.counts], weights.sum()

    def _batch(self, grad_scale: float) -> Batch | None:
        # joined backward passes of all ranks since the last step; None if there are none
        batch = over_ranks(joined(self._pending) if self._pending else None, self.factors)
        return batch if batch is None or grad_scale == 1.0 else batch.scaled(1 / grad_scale)

    def _add(self, batch: Batch) -> None:
        self._pending.append(batch)
        if len(self._pending) == MAX_PENDING:
            warnings.warn(
                f"{MAX_PENDING} backward passes of a SphericalLinear without a step: call layer.step(lr), or use "
                "SphericalSGD(layer, lr=...); other optimizers do not train this layer",
                stacklevel=2,
            )


class _Losses(torch.autograd.Function):
    """The losses of m samples [m]. The backward pass also stores, in ``layer._pending``, what the next step needs."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, labels: Tensor, weights: Tensor, layer: SphericalLinear, _: Tensor
    ) -> Tensor:
        factors, H = layer.factors, layer._rows(features.detach())
        HQ, *sums = factors.sums(H, labels)
        with torch.enable_grad():
            s, q, a = (x.detach().requires_grad_() for x in sums)
            losses = loss_per_sample(layer.loss, s, q, a, labels, weights, layer.num_classes)
            gs, gq, ga = torch.autograd.grad(losses.sum(), (s, q, a), allow_unused=True, materialize_grads=True)
        dH = factors.feature_gradient(HQ, labels, gs, gq, ga)
        ctx.layer = layer
        ctx.version = layer._version
        ctx.dtype = features.dtype
        ctx.save_for_backward(H, HQ, s.detach(), labels, gs, gq, ga, dH)
        return losses.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        layer = ctx.layer
        if ctx.version != layer._version:
            raise RuntimeError("layer.step() was called between this forward pass and its backward pass")
        batch = Batch(*ctx.saved_tensors).scaled(cotangent)
        layer._add(batch)
        return batch.dH[:, : layer.in_features].to(ctx.dtype), None, None, None, None


class SphericalSGD(torch.optim.Optimizer):
    """An optimizer that trains one :class:`SphericalLinear` layer by SGD without momentum.

    Args:
        layer: the layer to train. The rest of the model needs a separate optimizer.
        lr: learning rate. The schedulers of ``torch.optim.lr_scheduler`` can change this rate.
        weight_decay: factor of the L2 decay, as in ``torch.optim.SGD``.
        max_norm: largest norm of the gradient [n, d]. A larger gradient is scaled down to this norm. None: no limit.

    Example:
        >>> layer = SphericalLinear(16, 1000)
        >>> optimizer = SphericalSGD(layer, lr=0.1)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    """

    def __init__(
        self, layer: SphericalLinear, *, lr: float, weight_decay: float = 0.0, max_norm: float | None = None
    ) -> None:
        if not isinstance(layer, SphericalLinear):
            raise TypeError(f"layer must be a SphericalLinear, got {type(layer).__name__}")
        check_step(lr, weight_decay, max_norm)
        self._layer = layer
        super().__init__([layer.factors.V], {"lr": lr, "weight_decay": weight_decay, "max_norm": max_norm})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group["params"] != [self._layer.factors.V]:
            raise TypeError("SphericalSGD trains the weight of one SphericalLinear: use another optimizer for the rest")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        self._layer.step(float(group["lr"]), weight_decay=group["weight_decay"], max_norm=group["max_norm"])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._layer.zero_grad(set_to_none)


def check_step(lr: float, weight_decay: float, max_norm: float | None) -> None:
    number(lr, "lr", at_least=0)
    number(weight_decay, "weight_decay", at_least=0)
    if max_norm is not None:
        number(max_norm, "max_norm", above=0)
