"""A linear output layer and its spherical loss in one module. The algorithm is in README.md beside this file."""

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from topk_registry.nn.spherical.factors import WORST_CONDITION, Batch, FactoredWeight, SingularStepError, joined
from topk_registry.nn.spherical.links import SQUARED_ERROR, LogWeights, SumsLoss, per_sample, resolve
from topk_registry.nn.spherical.optimizer import MARK, check_step
from topk_registry.nn.spherical.ranks import gathered
from topk_registry.ops.ksubset.chunked.api import TopClasses
from topk_registry.ops.ksubset.torch.state import State, merge, summarise, top_margins
from topk_registry.ops.targets.masses import Reduction

CHUNK = 1 << 20  # scores in a chunk
Target = Tensor | tuple[Tensor, Tensor]


class SphericalLinear(nn.Module):
    """A linear classifier trained by a spherical loss at a cost that does not depend on the number of classes.

    ``layer(features, target)`` is the loss, and its backward pass gives the exact gradient to the features. Then
    ``layer.step(lr)`` makes the update that SGD would make on the dense weight [n, d], in O(d^2) a sample. Of the rows
    of the large factor it touches those of the batch's labels. The backbone keeps its own optimizer. README.md says
    which update rules are exact.

    Such losses rank well at any n, but their probabilities are limited: over all features, the largest probabilities of
    the classes add up to at most d + 1. With many more classes than features the likelihood stays poor, whatever the
    backbone.

    Args:
        in_features: length d of a feature vector.
        num_classes: n.
        bias: learn a bias, as a feature that is always 1.
        loss: name of a registered loss of the spherical family, such a loss itself, or ``"mse"``: the squared error to
            the target's weights, summed over classes.
        loss_options: options of the loss by name, such as ``{"epsilon": 0.1}``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: rows with this label cost nothing, train nothing, and are not counted in the mean.
        fold_every: recompute the small state from the weight after this number of steps.
        dtype: of the large factor; the small state is in double precision.

    Shape: features [B, d]; target class indices [B], or (indices [B, K], weights [B, K]).

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

    in_features: int
    num_classes: int
    bias: bool
    reduction: str
    ignore_index: int
    fold_every: int
    factors: FactoredWeight
    loss: SumsLoss | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        loss: str | nn.Module = SQUARED_ERROR,
        loss_options: Mapping[str, Any] | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        fold_every: int = 10_000,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(in_features, num_classes - 1, fold_every) < 1:
            raise ValueError(
                "expected in_features of at least 1, num_classes of at least 2 and fold_every of at least 1, got "
                f"{in_features}, {num_classes} and {fold_every}"
            )
        Reduction.of(reduction)
        weight = torch.empty(num_classes, in_features + bias, device=device, dtype=dtype)
        if weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be float32 or float64, got {weight.dtype}: steps are lost in half precision")
        self.in_features, self.num_classes, self.bias = in_features, num_classes, bool(bias)
        self.reduction, self.ignore_index, self.fold_every = reduction, int(ignore_index), fold_every
        self.loss = resolve(loss, dict(loss_options or {}))
        bound = 1 / math.sqrt(in_features)
        self.factors = FactoredWeight(nn.init.uniform_(weight, -bound, bound))
        self._pending: list[Batch] = []
        self._version = 0  # counts steps

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "SphericalLinear":
        """A layer that starts with the weight, and the bias, of ``linear``."""
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
        """The loss of features [B, d] with these targets; all of it in double precision."""
        setattr(self.factors.V, MARK, True)  # copying and unpickling lose it
        rows, labels, weights, share = self._targets(features, target)
        kept = features if rows is None else features[rows]
        with torch.autocast(features.device.type, enabled=False):
            # its backward pass is wanted for the weight's sake too, where the features need no gradient
            anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
            losses = _Losses.apply(kept, labels, weights, self, anchor)
        if self.reduction == "none":
            losses = losses if rows is None else losses.new_zeros(len(features)).index_copy(0, rows, losses)
            return losses.to(features.dtype)
        total = losses.sum()
        return (total if self.reduction == "sum" else total / share.sum()).to(features.dtype)

    if TYPE_CHECKING:  # torch declares that a call gives anything

        def __call__(self, features: Tensor, target: Target) -> Tensor: ...

    @torch.no_grad()
    def step(
        self, lr: float, *, weight_decay: float = 0.0, max_norm: float | None = None, grad_scale: float = 1.0
    ) -> None:
        """Update the weight as ``torch.optim.SGD(lr=lr, weight_decay=weight_decay)`` would the dense one.

        Every backward pass since the last step counts, as accumulated gradients do. Without one, the weight stays as it
        is, with a warning. In a process group of several ranks all must call it; the gradient is the mean over ranks,
        as under DDP.

        Args:
            lr: learning rate.
            weight_decay: L2 decay.
            max_norm: clip the norm of the dense gradient, as ``clip_grad_norm_``; :meth:`gradient_norm` gives it.
            grad_scale: what the loss was multiplied by before its backward pass, such as a gradient scaler's scale.

        Raises:
            SingularStepError: where the new weight would not be finite; it stays as it was.
        """
        check_step(lr, weight_decay, max_norm)
        batch = self._batch(grad_scale)
        if batch is None:
            warnings.warn(
                "SphericalLinear.step() follows no backward pass since the last step or zero_grad(): the weight stays "
                "as it is",
                stacklevel=2,
            )
            return
        if max_norm is not None:
            batch = batch.scaled((max_norm / (self.factors.gradient_norm(batch) + 1e-6)).clamp(max=1.0).item())
        self.factors.update(batch, lr, weight_decay)
        self._pending, self._version = [], self._version + 1
        if self.factors.condition() > WORST_CONDITION or int(self.factors.steps) % self.fold_every == 0:
            self.factors.fold()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Norm of the dense weight's gradient, from all backward passes since the last step."""
        batch = self._batch(1.0)
        return 0.0 if batch is None else float(self.factors.gradient_norm(batch))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what backward passes left since the last step."""
        super().zero_grad(set_to_none)
        self._pending = []

    @torch.no_grad()
    def scores(self, features: Tensor, classes: Tensor | None = None) -> Tensor:
        """Scores of features [B, d]: of these classes [B, K], or of all [B, n]."""
        H = self._rows(features)
        if classes is None:
            blocks = [chunk for _, chunk in self._chunks(H, None)]
            return torch.cat(blocks, 1).to(features.dtype)
        return self.factors.sums(H, self._checked(classes, len(H)))[3].to(features.dtype)

    @torch.no_grad()
    def topk(self, features: Tensor, k: int, *, chunk: int | None = None) -> TopClasses:
        """The k most probable classes of features [B, d], best first, without all scores at once.

        Returns:
            ``indices``; ``logits``: logarithms of what the probabilities are in proportion to; ``marginals``: exact
            probability of being in the top-k set drawn by them; each [B, k]. For ``"mse"``, logits are the scores.
        """
        if not 1 <= k < self.num_classes:
            raise ValueError(f"k must be an integer from 1 to n - 1 = {self.num_classes - 1}, got {k!r}")
        state: State | None = None
        for first, scores in self._chunks(self._rows(features), chunk, least=2 * k + 3):
            x = scores if self.loss is None else self.loss.log_weights(scores)
            part = summarise(x, k + 1, 1.0, first)
            state = part if state is None else merge(state, part, 1.0)
        assert state is not None
        marginals = torch.sigmoid(top_margins(state, 1.0))
        best = state.classes[:, :k], state.top[:, :k], marginals
        return TopClasses(best[0], best[1].to(features.dtype), best[2].to(features.dtype))

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """The dense layer of the same scores."""
        W = self.factors.dense()
        linear = nn.Linear(self.in_features, self.num_classes, self.bias, device=W.device, dtype=W.dtype)
        linear.weight.copy_(W[:, : self.in_features])
        if self.bias:
            linear.bias.copy_(W[:, -1])
        return linear

    def to_classifier(self) -> nn.Module:
        """The dense layer with the loss's link behind it: softmax of its output is what the loss predicts.

        Export this one. The scores themselves are no logits of a softmax, except for a bound on it.
        """
        linear = self.to_linear()
        return linear if self.loss is None else nn.Sequential(linear, LogWeights(self.loss))

    def extra_repr(self) -> str:
        loss = SQUARED_ERROR if self.loss is None else type(self.loss).__name__
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias}, loss={loss}, "
            f"reduction={self.reduction!r}"
        )

    def _rows(self, features: Tensor) -> Tensor:
        """Features [B, d] in double precision, with a column of ones for the bias."""
        if features.ndim != 2 or features.shape[1] != self.in_features or not features.is_floating_point():
            raise ValueError(
                f"features must be floating point [B, {self.in_features}], got {features.dtype} {list(features.shape)}"
            )
        H = features.double()
        return torch.cat((H, H.new_ones(len(H), 1)), 1) if self.bias else H

    def _checked(self, labels: Tensor, B: int) -> Tensor:
        if labels.dtype.is_floating_point or labels.ndim != 2 or len(labels) != B:
            raise ValueError(f"labels must be integers [{B}, K], got {labels.dtype} {list(labels.shape)}")
        if labels.numel():
            low, high = (int(bound) for bound in labels.aminmax())
            if low < 0 or high >= self.num_classes:
                wrong = low if low < 0 else high
                raise ValueError(f"labels must be in [0, {self.num_classes - 1}], got {wrong}")
        return labels.long()

    def _targets(self, features: Tensor, target: Target) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """The m rows that count, None for all; their labels and weights [m, K], and each one's share [m] in the mean.

        A row that is ignored has no part in any sum: whatever the loss makes of a row without labels, and whatever its
        features are.
        """
        B, like = len(features), {"dtype": torch.float64, "device": features.device}
        if isinstance(target, tuple):
            labels, given = target
            if given.shape != labels.shape or not given.is_floating_point():
                raise ValueError(
                    f"weights must be floating point and as indices {list(labels.shape)}, got {given.dtype} "
                    f"{list(given.shape)}"
                )
            return None, *self._weighted(self._checked(labels, B), given.to(**like), torch.ones(B, **like))
        if target.is_floating_point() or target.shape != (B,):
            raise ValueError(
                f"target must be class indices [{B}] or (indices [B, K], weights [B, K]), got {target.dtype} "
                f"{list(target.shape)}; a dense distribution would cost what this layer avoids"
            )
        rows = (target != self.ignore_index).nonzero()[:, 0]
        labels = self._checked(target[rows, None], len(rows))
        ones = torch.ones(len(rows), **like)
        return None if len(rows) == B else rows, *self._weighted(labels, ones[:, None], ones)

    def _weighted(self, labels: Tensor, weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor = getattr(self.loss, "weight", None)
        if factor is None:
            return labels, weights, share
        if len(factor) != self.num_classes:
            raise ValueError(f"weight has {len(factor)} entries, the layer has {self.num_classes} classes")
        weights = weights * factor.to(weights)[labels]
        return labels, weights, weights.sum(1)

    def _batch(self, grad_scale: float) -> Batch | None:
        """All that is pending on all ranks; a rank without a backward pass takes part with no samples."""
        own = joined(self._pending) if self._pending else None
        batch = gathered(own, self.factors)
        return batch if batch is None or grad_scale == 1.0 else batch.scaled(1 / grad_scale)

    def _chunks(self, H: Tensor, chunk: int | None, least: int = 1) -> Iterator[tuple[int, Tensor]]:
        """First class and scores [B, chunk] of one chunk of classes after the other."""
        chunk = max(CHUNK // max(len(H), 1), 1024) if chunk is None else int(chunk)
        if chunk < 1:
            raise ValueError(f"chunk must be a number of classes of at least 1, got {chunk!r}")
        HU, shift, V = H @ self.factors.U.T, (H @ self.factors.omega)[:, None], self.factors.V
        for first in range(0, self.num_classes, max(chunk, least)):
            yield first, HU.to(V.dtype) @ V[first : first + max(chunk, least)].T + shift.to(V.dtype)


class _Losses(torch.autograd.Function):
    """Losses [B] and the gradient to the features; the backward pass leaves its batch with the layer."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, labels: Tensor, weights: Tensor, layer: SphericalLinear, _: Tensor
    ) -> Tensor:
        factors, H = layer.factors, layer._rows(features.detach())
        HQ, *sums = factors.sums(H, labels)
        with torch.enable_grad():
            s, q, a = (x.detach().requires_grad_() for x in sums)
            losses = per_sample(layer.loss, s, q, a, weights, layer.num_classes)
            gs, gq, ga = torch.autograd.grad(losses.sum(), (s, q, a), allow_unused=True, materialize_grads=True)
        dH = factors.feature_gradient(HQ, labels, gs, gq, ga)
        ctx.layer, ctx.version, ctx.dtype = layer, layer._version, features.dtype
        ctx.save_for_backward(H, HQ, s.detach(), labels, gs, gq, ga, dH)
        return losses.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        layer = ctx.layer
        if ctx.version != layer._version:
            raise RuntimeError("layer.step() was called between this forward pass and its backward pass")
        batch = Batch(*ctx.saved_tensors).scaled(cotangent)
        layer._pending.append(batch)
        return batch.dH[:, : layer.in_features].to(ctx.dtype), None, None, None, None


__all__ = ["SingularStepError", "SphericalLinear"]
