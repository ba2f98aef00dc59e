"""The weight matrix W [n, d] of :class:`SphericalLinear`, stored as W = V U + 1 omega^T, and the SGD step.

V is [n, d], U is [d, d], omega is [d], and 1 is a vector of n ones. Numbers such as (3) are formulas in README.md.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn

from topk_registry.losses.adjustable import KeepsNumbers
from topk_registry.nn.spherical.links import same_label
from topk_registry.ops.distributed import all_gather, gather_rows

SINGULAR = 1e3  # if |R| exceeds this multiple of |U^-T H^T|, the inverse in (8) is too imprecise
MAX_CONDITION = 100.0  # if |U| |U^-1| / d exceeds this number, rounding errors in V are amplified too much
FOLD_ROWS = 1 << 16  # number of rows of V that a fold processes at once


class SingularStepError(FloatingPointError):
    """Raised if the weight after a step would not be finite. The weight stays as before the step."""


@dataclass
class Batch:
    """The tensors that an SGD step needs, for m samples with K labels each. All except ``labels`` are float64."""

    H: Tensor  # [m, d] features
    HQ: Tensor  # [m, d] product H Q, where Q = W^T W
    s: Tensor  # [m] sum of all scores of each sample
    labels: Tensor  # [m, K] class indices
    gs: Tensor  # [m] derivative of the loss with respect to s
    gq: Tensor  # [m] derivative with respect to q, the sum of the squares of all scores
    ga: Tensor  # [m, K] derivative with respect to the scores of the labels
    dH: Tensor  # [m, d] gradient with respect to the features  # noqa: N815  the README's symbol

    def scaled(self, factor: Tensor | float) -> "Batch":
        """Return a new batch, with the derivatives multiplied by ``factor``: one number, or one per sample [m]."""
        column = factor[:, None] if isinstance(factor, Tensor) and factor.ndim else factor
        scaled = {name: getattr(self, name) * factor for name in ("gs", "gq")}
        scaled |= {name: getattr(self, name) * column for name in ("ga", "dH")}
        return Batch(**{field.name: scaled.get(field.name, getattr(self, field.name)) for field in fields(self)})


def joined(batches: list[Batch]) -> Batch:
    """Concatenate batches. Samples with fewer labels than others are padded with labels that have no effect."""
    K = max(batch.labels.shape[1] for batch in batches)

    def column(name: str) -> Tensor:
        parts = [getattr(batch, name) for batch in batches]
        if name in ("labels", "ga"):
            parts = [nn.functional.pad(part, (0, K - part.shape[1])) for part in parts]
        return torch.cat(parts)

    return Batch(**{field.name: column(field.name) for field in fields(Batch)})


def over_ranks(own: Batch | None, factors: "FactoredWeight") -> Batch | None:
    """Join the batches of all ranks. Divide gradients by the number of ranks. If no rank has a batch, return None."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return own
    d, device = factors.Q.shape[0], factors.V.device
    shapes = all_gather(torch.tensor([-1, 0] if own is None else own.labels.shape, device=device), None)
    K = int(shapes[:, 1].max())
    if int(shapes[:, 0].max()) < 0:  # no backward pass on any rank
        return None
    rows = torch.zeros(0, 3 * d + 3 + 2 * K, dtype=torch.float64, device=device)
    if own is not None:
        pad = (0, K - own.labels.shape[1])
        labels, ga = (nn.functional.pad(value.double(), pad) for value in (own.labels, own.ga))  # exact up to 2^53
        sums = torch.stack((own.s, own.gs, own.gq), 1)
        rows = torch.cat((own.H, own.HQ, own.dH, sums, labels, ga), 1)
    rows = gather_rows(rows, shapes[:, 0].clamp(min=0).tolist(), None)
    H, HQ, dH, sums, labels, ga = rows.split([d, d, d, 3, K, K], 1)
    s, gs, gq = sums.unbind(1)
    return Batch(H, HQ, s, labels.long(), gs, gq, ga, dH).scaled(1 / dist.get_world_size())


class FactoredWeight(KeepsNumbers):
    """The weight W [n, d], stored as factors: W = V U + 1 omega^T, where 1 is a vector of n ones.

    Q = W^T W and w = W^T 1 are stored too. V [n, d] has the dtype of ``weight``. U [d, d], omega [d], Q [d, d] and
    w [d] are in double precision.
    """

    V: nn.Parameter
    U: Tensor
    U_inverse_t: Tensor
    omega: Tensor
    Q: Tensor
    w: Tensor
    steps: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        d = weight.shape[1]
        small = {"dtype": torch.float64, "device": weight.device}
        # V is a parameter so that parameter counts include V. Autograd computes no gradient for V.
        self.V = nn.Parameter(weight, requires_grad=False)
        for name, value in (
            ("U", torch.eye(d, **small)),
            ("U_inverse_t", torch.eye(d, **small)),
            ("omega", torch.zeros(d, **small)),
            ("Q", torch.zeros(d, d, **small)),
            ("w", torch.zeros(d, **small)),
            ("steps", torch.zeros((), dtype=torch.int64)),
        ):
            self.register_buffer(name, value)
        self.fold()

    @property
    def n(self) -> int:
        return self.V.shape[0]

    def rows(self, classes: Tensor) -> Tensor:
        return self.V[classes].double()

    def sums(self, H: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (H Q, s, q, a) for features H [m, d] and labels [m, K]. README.md has the formula (3).

        H Q is [m, d]. Q is W^T W, where W [n, d] is the weight. s [m] is the sum of all n scores of a sample. q [m] is
        the sum of the squares of these scores. a [m, K] are the scores of the labels.
        """
        HQ = H @ self.Q
        s = H @ self.w
        a = (self.rows(labels) * (H @ self.U.T)[:, None]).sum(-1) + (H @ self.omega)[:, None]
        distinct = (a.square() / same_label(labels).sum(-1)).sum(1)  # a repeated label counts once
        q = torch.maximum((HQ * H).sum(-1), torch.maximum(s.square() / self.n, distinct))
        return HQ, s, q, a

    def feature_gradient(self, HQ: Tensor, labels: Tensor, gs: Tensor, gq: Tensor, ga: Tensor) -> Tensor:
        """Return the gradient of the losses with respect to the features: [m, d]. README.md has the formulas (4), (5).

        ``HQ`` is H Q. ``gs``, ``gq`` and ``ga`` are the derivatives of the losses with respect to s, q and a. The
        method :meth:`sums` returns H Q, s, q and a.
        """
        Z = (ga[..., None] * self.rows(labels)).sum(1) @ self.U + ga.sum(1)[:, None] * self.omega + gs[:, None] * self.w
        return 2 * gq[:, None] * HQ + Z

    def gram(self, x: Batch) -> Tensor:
        """Return G G^T [m, m], formula (10) in README.md. G [m, n] is the gradient with respect to the scores."""
        Z = x.dH - 2 * x.gq[:, None] * x.HQ
        total = x.ga.sum(1)
        X = 2 * x.gq[:, None] * (x.H @ Z.T) + torch.outer(x.gs, total)
        distinct, place = x.labels.unique(return_inverse=True)
        sparse = x.ga.new_zeros(len(x.ga), len(distinct)).scatter_add_(1, place, x.ga)
        squares = 4 * torch.outer(x.gq, x.gq) * (x.HQ @ x.H.T)
        return squares + self.n * torch.outer(x.gs, x.gs) + sparse @ sparse.T + X + X.T

    def gradient_norm(self, x: Batch) -> Tensor:
        return (self.gram(x) * (x.H @ x.H.T)).sum().clamp(min=0).sqrt()

    @torch.no_grad()
    def update(self, x: Batch, lr: float, weight_decay: float) -> None:
        """Set W to (1 - lr * weight_decay) W - lr dW, where dW is the gradient with respect to W.

        README.md has the formulas (6) to (12). If the new weight would not be finite, raise SingularStepError and
        change nothing.
        """
        rho = 1 - lr * weight_decay
        B = 2 * lr * x.gq
        BH = B[:, None] * x.H
        U = rho * self.U - (x.H @ self.U.T).T @ BH
        omega = rho * self.omega - x.H.T @ (B * (x.H @ self.omega) + lr * x.gs)
        cross = x.dH.T @ x.H
        Q = rho * (rho * self.Q - lr * (cross + cross.T)) + lr * (lr * (x.H.T @ self.gram(x) @ x.H))
        w = rho * self.w - lr * (x.H.T @ (2 * x.gq * x.s + self.n * x.gs + x.ga.sum(1)))
        if not math.isfinite(float(U.sum() + omega.sum() + Q.sum() + w.sum())):
            raise SingularStepError(
                f"the step with lr = {lr:g} is not finite: features, loss or learning rate are too large. "
                "The weights are unchanged"
            )
        inverse = self._inverse(x, U, BH, rho)
        self.U = U
        self.omega = omega
        self.Q = (Q + Q.T) / 2
        self.w = w
        if inverse is None:  # the first case in section 4 of README.md
            self._fold_into_v()
            self._subtract(x, lr, x.H)
            self.U_inverse_t = torch.eye(len(U), dtype=U.dtype, device=U.device)
        else:
            self.U_inverse_t, R = inverse
            self._subtract(x, lr, R)
        self.steps += 1

    def condition(self) -> float:
        """Return |U|_F |U^-1|_F / d for the weight V U + 1 omega^T. If it is large, V U has large rounding errors."""
        return float(self.U.norm() * self.U_inverse_t.norm()) / len(self.U)

    @torch.no_grad()
    def fold(self) -> None:
        """Store W = V U + 1 omega^T in V: set V = W, U = I, omega = 0. Compute Q = V^T V and w, the sum of V's rows."""
        self._fold_into_v()
        self.U_inverse_t = self.U.clone()
        self.Q, self.w = torch.zeros_like(self.Q), torch.zeros_like(self.w)
        for block in self.V.split(FOLD_ROWS):
            rows = block.double()
            self.Q.addmm_(rows.T, rows)
            self.w += rows.sum(0)

    def dense(self) -> Tensor:
        """Return W in the dtype of V."""
        return self.V.double().mm(self.U).add_(self.omega).to(self.V.dtype)

    def _inverse(self, x: Batch, U: Tensor, BH: Tensor, rho: float) -> tuple[Tensor, Tensor] | None:
        # returns U^-T and R^T of formula (8) in README.md, for U after the step; None if R is imprecise
        m, d = x.H.shape
        before = x.H @ self.U_inverse_t.T
        if rho == 0:
            return None
        if m > d:
            inverse, info = torch.linalg.inv_ex(U)
            U_inverse_t, R = inverse.T.contiguous(), x.H @ inverse
        else:
            C = rho * torch.eye(m, dtype=U.dtype, device=U.device) - BH @ x.H.T
            R, info = torch.linalg.solve_ex(C.T, before)
            U_inverse_t = (self.U_inverse_t + R.T @ BH) / rho
        # multiply by |rho|, because R contains a factor 1 / rho, which does not show that R is imprecise
        if bool(info != 0) or not bool(R.norm() * abs(rho) <= SINGULAR * before.norm()):
            return None
        return (U_inverse_t, R) if bool(U_inverse_t.isfinite().all()) else None

    def _subtract(self, x: Batch, lr: float, rows: Tensor) -> None:
        change = (-lr * x.ga[..., None] * rows[:, None]).flatten(0, 1).to(self.V.dtype)
        self.V.index_add_(0, x.labels.flatten(), change)

    def _fold_into_v(self) -> None:
        for block in self.V.split(FOLD_ROWS):
            block.copy_(block.double().mm(self.U).add_(self.omega))
        self.U = torch.eye(len(self.U), dtype=self.U.dtype, device=self.U.device)
        self.omega = torch.zeros_like(self.omega)
