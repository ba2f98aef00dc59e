"""Each loss by its plain formula in double precision: a table [B, n], the loss of a row if its label were each class.

Formulas enumerate subsets, sort, and bisect; autograd gives their gradients. They share no code with the package.
``LOSSES`` draws options of each loss, and has its formula with such options. The formulas of ``PER_LABEL`` build a
table per label, so that they suit a few hundred classes.
"""

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

COUNTS = [50, 3, 20, 1, 7, 100, 2, 11, 5] * 250
PER_LABEL = {"topk_svm", "topk_hinge", "topk_hinge_convex", "sigmoid_mse", "sigmoid_mae", "ldam", "ldr_kl", "aldr_kl",
             "encouraging", "mirror", "sparse_topk", "differentiable_topk"}  # fmt: skip


def subsets(n: int, k: int) -> Tensor:
    """Return the k-subsets of n classes, [number, n] of booleans."""
    chosen = torch.tensor(list(combinations(range(n), k)))
    return torch.zeros(len(chosen), n, dtype=torch.bool).scatter(1, chosen, True)


def log_sums(x: Tensor, k: int) -> list[Tensor]:
    """Return log sigma_j(exp x[:, :i]) for j to k as [B, k + 1], for i from 0 to n."""
    none = torch.full_like(x[:, :1], -1e300)  # log 0, but without a NaN in the gradient of logaddexp
    sums = [torch.cat([torch.zeros_like(none), none.expand(-1, k)], 1)]
    for score in x.split(1, 1):
        with_score = torch.cat([none, sums[-1][:, :-1] + score], 1)
        sums.append(torch.logaddexp(sums[-1], with_score))
    return sums


def log_subsets(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the log of the summed weights of the k-subsets with and without each class, [B, n] both."""
    if x.shape[1] <= 9:
        members = subsets(x.shape[1], k)
        sums = x @ members.double().T
        inside = torch.where(members.T, sums[:, None], -torch.inf).logsumexp(-1)
        return inside, torch.where(members.T, -torch.inf, sums[:, None]).logsumexp(-1)
    before = torch.stack(log_sums(x, k)[:-1], 1)  # [B, n, k + 1]
    after = torch.stack(log_sums(x.flip(1), k)[:-1], 1).flip(1, 2)  # of size k - j at j
    inside = x + (before[..., :-1] + after[..., 1:]).logsumexp(-1)
    return inside, (before + after).logsumexp(-1)


def smooth_topk(s: Tensor, k: int, tau: float, alpha: Tensor | float = 0.0) -> Tensor:
    inside, outside = log_subsets(s / (k * tau), k)
    return tau * F.softplus(alpha / tau - inside + outside, threshold=700)


def rivals(s: Tensor) -> Tensor:
    """Return the scores of the other classes in descending order, [B, n, n - 1]."""
    own = torch.eye(s.shape[1], dtype=torch.bool)
    return torch.where(own, -torch.inf, s[:, None]).sort(-1, descending=True).values[..., :-1]


def convex_hinge(s: Tensor, k: int) -> Tensor:
    raised = s[:, None] + 1 - torch.eye(s.shape[1], dtype=s.dtype)
    return (raised.sort(-1, descending=True).values[..., :k].mean(-1) - s).clamp(min=0)


def calibrated_hinge(s: Tensor, k: int, gap: Tensor | float = 1.0, scale: float = 1.0) -> Tensor:
    return scale * (gap + s.sort(-1, descending=True).values[:, k, None] - s).clamp(min=0)


def gaps(n: int) -> Tensor:
    counts = torch.tensor(COUNTS[:n], dtype=torch.float64)
    return counts**-0.25 / (counts**-0.25).max()


def epsilon_softmax(s: Tensor, k: int, m: float, alpha: float, beta: float, floor: float) -> Tensor:
    p = s.softmax(1)
    among = (s > s.sort(1, descending=True).values[:, k, None]).double()
    return -alpha * ((p + m * among) / (1 + k * m)).clamp(min=floor).log() + 2 * beta * (1 - p)


def encouraging(s: Tensor, log_end: float, bonus_start: float, rho: float) -> Tensor:
    def bonus(p: Tensor, q: Tensor) -> Tensor:  # q = 1 - p
        tangent = torch.tensor(max(1 - log_end, 1e-300)).double().log() - (p - log_end) / max(1 - log_end, 1e-300)
        return torch.where(p <= log_end, q.clamp(min=1e-5).log() if log_end == 1 else q.log(), tangent)

    p, q = s.softmax(1), torch.where(torch.eye(s.shape[1]).bool(), 0.0, s.softmax(1)[:, None]).sum(-1)
    start = torch.tensor(bonus_start).double()
    rewarded = bonus(p, q) - bonus(start, 1 - start)
    return -s.log_softmax(1) + rho * torch.where(p > bonus_start, rewarded, 0.0)


def mirror(s: Tensor, base: str, gamma: float, rho: float, link: str) -> Tensor:
    p, own = s.sigmoid() if link == "sigmoid" else s.softmax(1), torch.eye(s.shape[1]).bool()
    right = torch.where(own, p[:, None], 1 - p[:, None])  # [B, label, class]
    return ((1 - right) ** (2 if base == "mse" else 1) - rho * right**gamma).mean(-1)


def sigmoid_error(s: Tensor, power: int) -> Tensor:
    return ((s.sigmoid()[:, None] - torch.eye(s.shape[1], dtype=s.dtype)).abs() ** power).mean(-1)


def bouchard(s: Tensor) -> Tensor:
    low = torch.full_like(s[:, :1], -12.0)
    high = torch.full_like(s[:, :1], 8.0)
    D = s.shape[1]
    m = s.mean(1, True)

    def bound(log_xi: Tensor) -> Tensor:
        xi = log_xi.exp()
        curve = (xi / 2).tanh() / (4 * xi)
        a = (m + (D / 2 - 1) / (2 * D * curve)).detach()
        return a + ((s - a - xi) / 2 + curve * ((s - a) ** 2 - xi**2) + F.softplus(xi, threshold=700)).sum(1, True)

    for _ in range(60):
        middle = ((low + high) / 2).detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(bound(middle).sum(), middle)
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    return bound(((low + high) / 2).detach()) - s


def aldr(s: Tensor, temperature: float, alpha: float, gap: float) -> Tensor:
    n = s.shape[1]
    z = s[:, None] - s[..., None] + gap * (1 - torch.eye(n, dtype=s.dtype))
    slope = alpha * torch.tensor(n).double().log() / temperature
    low = torch.zeros_like(s)
    high = temperature + 0 * s
    for _ in range(60):  # of a large alpha there is one solution
        middle = ((low + high) / 2).detach()
        log_p = (z.detach() / middle[..., None]).log_softmax(-1)
        above = slope * (temperature - middle) < (log_p.exp() * (log_p + torch.tensor(n).double().log())).sum(-1)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    mean = (z / middle[..., None]).logsumexp(-1) - torch.tensor(n).double().log()
    return middle * mean - slope / 2 * (middle - temperature) ** 2


def bisected(x: Tensor, k: float, share: Callable[[Tensor], Tensor], reach: float) -> Tensor:
    """Return b [B, 1] with sum share(x - b) = k."""
    low, high = x.detach().amin(-1, True) - reach, x.detach().amax(-1, True) + reach
    for _ in range(64):
        middle = (low + high) / 2
        more = share(x.detach() - middle).sum(-1, True) > k
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return middle


def one_threshold(s: Tensor, k: float, tau: float, share: Callable[[Tensor], Tensor]) -> Tensor:
    def excess(u: Tensor) -> Tensor:  # sum share(u) - k, which keeps its digits where k scores are far above the others
        above = (u > 0).double()
        return above.sum(-1, True) - k + torch.where(u > 0, -share(-u), share(u)).sum(-1, True)

    x = s / tau
    low, high = x.detach().amin(-1, True) - 40, x.detach().amax(-1, True) + 40
    for _ in range(64):
        middle = (low + high) / 2
        more = excess(x.detach() - middle) > 0
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    b = middle.requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(excess(x.detach() - b).sum(), b)
    u = x - (b.detach() - excess(x - b.detach()) / slope)  # the implicit derivative
    return -torch.where(u > 0, torch.log1p(-share(-u)), share(u.clamp(max=0)).log())


def laplace(u: Tensor) -> Tensor:
    return torch.where(u <= 0, 0.5 * u.clamp(max=0).exp(), 1 - 0.5 * (-u.clamp(min=0)).exp())


def sparse_topk(s: Tensor, k: int, tau: float) -> Tensor:
    x, own = s / tau, torch.eye(s.shape[1]).bool()

    def value(x: Tensor, k: int) -> Tensor:
        mask = (x - bisected(x, k, lambda u: u.clamp(0, 1), 2.0)).clamp(0, 1).detach()
        return (torch.where(mask == 0, 0.0, x * mask) - mask**2 / 2).sum(-1)

    others = torch.stack([x[:, ~own[c]] for c in range(s.shape[1])], 1)
    best = value(others, k - 1) if k > 1 else torch.zeros_like(x)
    return tau * (value(x, k)[:, None] - best - x + 0.5)


def ranked(s: Tensor, k: int, tau: float, relaxation: str) -> Tensor:
    x, ranks = s / tau, torch.arange(1, k + 1)
    apart = (x[:, :, None] - x[:, None]).abs()
    if relaxation == "neuralsort":
        logits = (s.shape[1] + 1 - 2 * ranks)[:, None] * x[:, None] - apart.sum(1)[:, None]
    else:
        logits = -(x.sort(-1, descending=True).values[:, :k, None] - x[:, None]).abs()
    return -logits.log_softmax(-1).logsumexp(1) if k > 1 else -s.log_softmax(-1)


def softmax_curve(curve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the table of a loss that is a function of -log p."""
    return lambda s, **options: curve(-s.log_softmax(1), **options)


def focal(nll: Tensor, gamma: float) -> Tensor:
    return (1 - (-nll).exp()) ** gamma * nll


def gce(nll: Tensor, q: float) -> Tensor:
    return (1 - (-q * nll).exp()) / q


def ldam(s: Tensor, max_margin: float, scale: float) -> Tensor:
    lowered = s[:, None] - max_margin * torch.diag(gaps(s.shape[1]))
    return -(scale * lowered).log_softmax(-1).diagonal(dim1=1, dim2=2)


def adjusted(s: Tensor, tau: float = 1.0) -> Tensor:
    return -(s + tau * torch.tensor(COUNTS[: s.shape[1]]).double().log()).log_softmax(1)


def ldr(s: Tensor, temperature: float, gap: float) -> Tensor:
    z = s[:, None] - s[..., None] + gap * (1 - torch.eye(s.shape[1], dtype=s.dtype))
    return temperature * (z / temperature).exp().mean(-1).log()


def spherical(s: Tensor, epsilon: float) -> Tensor:
    return (s**2 + epsilon).sum(1, True).log() - (s**2 + epsilon).log()


def taylor(s: Tensor) -> Tensor:
    w = 1 + s + s**2 / 2
    return w.sum(1, True).log() - w.log()


Options = Callable[[random.Random, int], dict[str, Any]]


def drawn(**choices: Any) -> Options:
    """Return a function that draws each option: from a tuple, or by a call with the generator and n."""
    return lambda rng, n: {k: v(rng, n) if callable(v) else rng.choice(v) for k, v in choices.items()}


def size(rng: random.Random, n: int) -> int:
    return rng.randint(1, rng.choice([min(n - 1, 5), min(n - 1, 80), n - 1]))


def real_size(rng: random.Random, n: int) -> float:
    return rng.choice([rng.uniform(0.1, n - 0.1), rng.randint(1, n - 1)])


def counts(rng: random.Random, n: int) -> list[int]:
    return COUNTS[:n]


def without_counts(table: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda s, class_counts, **options: table(s, **options)


TAUS = (1e-3, 0.05, 0.1, 0.5, 1.0, 3.0, 1e3)
UNITS = (0.3, 1.0, 5.0)
GAPS = (0.0, 0.3, 1.0)
LOSSES: dict[str, tuple[Options, Callable[..., Tensor]]] = {
    "smooth_topk_svm": (drawn(k=size, tau=TAUS, alpha=GAPS), smooth_topk),
    "topk_nll": (drawn(k=size, tau=TAUS), smooth_topk),
    "ksubset_nll": (drawn(temperature=UNITS), lambda s, temperature: -(s / temperature).log_softmax(1)),
    "topk_svm": (drawn(k=size, alpha=GAPS), lambda s, k, alpha: ((rivals(s)[..., k - 1] - s) / k + alpha).clamp(min=0)),
    "topk_hinge": (drawn(k=size), lambda s, k: (1 + rivals(s)[..., k - 1] - s).clamp(min=0)),
    "topk_hinge_convex": (drawn(k=size), convex_hinge),
    "topk_hinge_calibrated": (drawn(k=size), calibrated_hinge),
    "noised_topk": (drawn(k=size, epsilon=(0.0,)), lambda s, k, epsilon: calibrated_hinge(s, k)),
    "noised_topk_imbalanced": (
        drawn(k=size, epsilon=(0.0,), max_margin=GAPS, scale=UNITS, class_counts=counts),
        without_counts(
            lambda s, k, epsilon, max_margin, scale: calibrated_hinge(s, k, max_margin * gaps(s.shape[1]), scale)
        ),
    ),
    "sigmoid_mse": (drawn(), lambda s: sigmoid_error(s, 2)),
    "sigmoid_mae": (drawn(), lambda s: sigmoid_error(s, 1)),
    "focal": (drawn(gamma=(0.0, 0.5, 1.0, 2.0, 3.5)), softmax_curve(focal)),
    "generalised_cross_entropy": (drawn(q=(0.1, 0.7, 1.0)), softmax_curve(gce)),
    "ldam": (drawn(max_margin=GAPS, scale=UNITS, class_counts=counts), without_counts(ldam)),
    "logit_adjustment": (drawn(tau=GAPS, class_counts=counts), without_counts(adjusted)),
    "balanced_softmax": (drawn(class_counts=counts), without_counts(adjusted)),
    "epsilon_softmax": (
        drawn(k=size, m=(0.0, 0.01, 1.0, 1e4), alpha=(0.01, 1.0), beta=(0.0, 1.0), floor=(0.0, 1e-3)),
        epsilon_softmax,
    ),
    "ldr_kl": (drawn(temperature=UNITS, gap=GAPS), ldr),
    "aldr_kl": (drawn(temperature=UNITS, alpha=(3.0, 10.0), gap=GAPS), aldr),
    "encouraging": (drawn(log_end=(0.0, 0.5, 0.75, 1.0), bonus_start=(0.0, 0.5), rho=GAPS), encouraging),
    "mirror": (drawn(base=("mse", "mae"), gamma=(1.5, 2.0, 3.0), rho=GAPS, link=("sigmoid", "softmax")), mirror),
    "log_spherical_softmax": (drawn(epsilon=UNITS), spherical),
    "log_taylor_softmax": (drawn(), taylor),
    "spherical_bound": (drawn(), bouchard),
    "soft_topk": (drawn(k=real_size, tau=UNITS), lambda s, k, tau: one_threshold(s, k, tau, torch.sigmoid)),
    "lapsum": (drawn(k=real_size, tau=UNITS), lambda s, k, tau: one_threshold(s, k, tau, laplace)),
    "sparse_topk": (drawn(k=size, tau=UNITS), sparse_topk),
    "differentiable_topk": (
        drawn(k=size, tau=UNITS, relaxation=("neuralsort", "softsort"), candidates=(None,)),
        lambda s, candidates, **options: ranked(s, **options),
    ),
}
