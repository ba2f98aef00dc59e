"""Cases of row kernels: rows of each kind, targets, and results of kernel and definition."""

import torch

from tests.ops.triton_runs import DEVICE
from topk_registry import ClassificationLoss, LabelMixture, use_backend
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


def target_for(kind: str, s: torch.Tensor) -> torch.Tensor | LabelMixture:
    return mixture_of(kind, s) if kind in MIXTURES else target_of(kind, s)


def by_kernel(
    loss: RowLoss,
    s: torch.Tensor,
    target: torch.Tensor | LabelMixture,
    *,
    smoothing=0.0,
    weighted=False,
    reduction="none",
    backend: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient by the loss's own kernel, called as a module calls it."""
    weight = torch.linspace(0, 2, s.shape[1], device=s.device, dtype=torch.float64) if weighted else None
    make = loss.on_gpu if backend == "triton" else loss.kernel
    assert make is not None
    kernel = make()
    assert kernel is not None
    if isinstance(target, LabelMixture):
        target, smoothing = target.smooth(smoothing), 0.0
    options = Options(target, weight, smoothing, -100, Reduction.of(reduction))
    value, gradient, *factor = kernel.run(loss.own, options, s, True)
    assert value is not None
    assert gradient is not None
    return value, gradient if not factor or factor[0] is None else gradient * factor[0]


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

    weight = torch.linspace(0, 2, s.shape[1], device=s.device, dtype=torch.float64) if weighted else None
    module = Defined(weight=weight, reduction=reduction, label_smoothing=smoothing)
    leaf = s.detach().double().requires_grad_()
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        target = target.double()
    with use_backend("torch"):
        value = module._definition(leaf, target, None)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def assert_agree(
    found, wanted, s: torch.Tensor, temperature: float = 1.0, factor: int = 8, untied: bool = False
) -> None:
    """Compare a kernel's result with the definition's in double precision; gradients of untied rows alone if so.

    Exponentials are as wrong as their arguments, which are scores over a temperature, and so is a loss that is a
    distance of scores: each row has the rounding of its own spread.
    """
    (value, gradient), (exact, exact_gradient) = found, wanted
    real = torch.float64 if s.dtype == torch.float64 else torch.float32
    assert value.dtype == real
    finite = torch.where(s.isfinite(), s.double(), torch.nan)
    spread = finite.nan_to_num(-torch.inf).amax(1) - finite.nan_to_num(torch.inf).amin(1)
    allowed = factor * torch.finfo(real).eps * (1 + spread / temperature)
    infinite = exact.isinf()
    assert torch.equal(value.double()[infinite], exact[infinite])
    if exact.ndim:
        off, size = (value.double() - exact).abs(), allowed * (temperature + exact.abs())
        assert (off <= size)[~infinite].all(), (off, size)
    elif not infinite:
        torch.testing.assert_close(value.double(), exact, rtol=float(allowed.max()), atol=float(allowed.max()))
    largest = exact_gradient.nan_to_num().abs().amax().clamp(min=1.0)
    stored = torch.finfo(gradient.dtype).eps if gradient.dtype in (torch.bfloat16, torch.float16) else 0.0
    good = exact_gradient.isfinite().all(1) & ~infinite  # where a loss is infinite, autograd has no gradient
    if untied:
        good &= torch.tensor([len(row.unique()) == len(row) for row in s], device=s.device)
    off = (gradient.double() - exact_gradient).abs()
    size = (allowed * largest)[:, None] + stored * exact_gradient.abs()
    assert (off <= size)[good].all(), (off.amax(1), size.amax(1))
