"""Cases of row kernels for GPUs: rows of each kind, targets, and results of kernel and definition."""

import torch

from tests.ops.triton_runs import DEVICE
from topk_registry import ClassificationLoss, LabelMixture
from topk_registry.ops.targets.masses import Options, Reduction
from topk_registry.rows import RowLoss

N = 30
EPS = torch.finfo(torch.float32).eps
KINDS = ("gaussian", "tied", "flat", "leader", "outlier", "ruled out")
TARGETS = {
    "labels": {"weighted": True, "reduction": "mean"},
    "smoothed": {"smoothing": 0.1, "weighted": True, "reduction": "sum"},
    "distribution": {"smoothing": 0.2, "reduction": "none"},
}
MIXTURES = {
    "mixed": {"weighted": True, "reduction": "mean"},
    "mixed and smoothed": {"smoothing": 0.2, "weighted": True, "reduction": "none"},
    "a share each": {"reduction": "sum"},
}


def scores(n: int = N) -> torch.Tensor:
    """A row of each kind."""
    s = torch.randn(len(KINDS), n, generator=torch.Generator().manual_seed(0)) * 2
    s[1] = s[1].round()
    s[1, 3] = s[1, 11] = 9.0  # in the same lane of two tiles
    s[2] *= 1e-3
    s[3, 4] += 60  # its chance rounds to 1
    s[4, 5] -= 200
    s[5, 1] = -torch.inf
    return s.to(DEVICE)


def mixture_of(kind: str, s: torch.Tensor) -> LabelMixture:
    label = torch.linspace(2, s.shape[1] - 1, len(s)).long()
    label[3] = 4  # the leader
    lam = torch.linspace(0.0, 1.0, len(s))
    if kind == "a share each":
        found = LabelMixture(label[:, None], lam[:, None])
    else:
        found = LabelMixture.mixed(label, label.flip(0), lam, 0.1 if kind == "mixed and smoothed" else 0.0)
    return found.scaled((torch.arange(len(s)) != 1).double()).to(DEVICE)  # a row without mass


def target_of(kind: str, s: torch.Tensor) -> torch.Tensor:
    if kind == "distribution":
        q = torch.linspace(-1, 1, s.shape[1], device=DEVICE).softmax(-1).repeat(len(s), 1)
        q[:, 1], q[0] = 0, 0  # a class and a row without mass
        return q
    label = torch.linspace(2, s.shape[1] - 1, len(s)).long()
    label[3] = 4  # the leader
    label[0] = -100
    return label.to(DEVICE)


def by_kernel(
    loss: RowLoss,
    s: torch.Tensor,
    target: torch.Tensor | LabelMixture,
    *,
    smoothing=0.0,
    weighted=False,
    reduction="none",
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.linspace(0, 2, s.shape[1], device=DEVICE) if weighted else None
    assert loss.on_gpu is not None
    kernel = loss.on_gpu()
    assert kernel is not None
    if isinstance(target, LabelMixture):
        target, smoothing = target.smooth(smoothing), 0.0
    options = Options(target, weight, smoothing, -100, Reduction.of(reduction))
    value, gradient, factor = kernel.run(loss.own, options, s, True)
    assert value is not None
    assert gradient is not None
    return value, gradient if factor is None else gradient * factor


def by_definition(
    loss: RowLoss,
    s: torch.Tensor,
    target: torch.Tensor | LabelMixture,
    *,
    smoothing=0.0,
    weighted=False,
    reduction="none",
) -> tuple[torch.Tensor, torch.Tensor]:
    """In double precision."""

    class Defined(ClassificationLoss):
        def row_loss(self, logits: torch.Tensor) -> RowLoss:
            return loss

    weight = torch.linspace(0, 2, s.shape[1], device=DEVICE, dtype=torch.float64) if weighted else None
    module = Defined(weight=weight, reduction=reduction, label_smoothing=smoothing)
    leaf = s.detach().double().requires_grad_()
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        target = target.double()
    value = module._definition(leaf, target, None)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def assert_agree(found, wanted, s: torch.Tensor) -> None:
    (value, gradient), (exact, exact_gradient) = found, wanted
    assert value.dtype == torch.float32
    spread = float(s[s.isfinite()].max() - s[s.isfinite()].min())
    infinite = exact.isinf()
    assert torch.equal(value.double()[infinite], exact[infinite])
    # exponentials are as wrong as their arguments, and so is a loss that is a distance of scores
    allowed = 8 * EPS * (1 + spread)
    torch.testing.assert_close(value.double()[~infinite], exact[~infinite], rtol=allowed, atol=allowed)
    largest = max(1.0, float(exact_gradient.nan_to_num().abs().max()))
    good = exact_gradient.isfinite().all(1)  # where a loss is infinite, autograd has no gradient
    torch.testing.assert_close(gradient[good].double(), exact_gradient[good], rtol=0.0, atol=allowed * largest)
