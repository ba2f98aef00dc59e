"""The two losses with kernels: smooth top-k and perturbed hinge, their definitions, and their autograd function."""

import math
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from topk_registry.checks import number
from topk_registry.ops.backend import Route, check_device, choose, is_plain, load, route, too_old
from topk_registry.ops.ksubset import graph
from topk_registry.ops.ksubset.api import LEAST_TEMPERATURE, blocks_of_rows, by_definition, check, working_dtype
from topk_registry.ops.ksubset.graph import soft_hinge
from topk_registry.ops.masses import Masses
from topk_registry.ops.perturbed import api as perturbed

LARGEST_K = {"cpu": 64, "cuda": 10}  # largest k for which there are kernels of the smooth top-k loss
MAX_TEMPERATURE = 1e30  # above this temperature, margins overflow in single precision
MODULES = {"numba": "topk_registry.ops.ksubset.cpu.labels", "triton": "topk_registry.ops.ksubset.triton.backend"}

Kernel = Callable[..., tuple[Tensor, Tensor | None]]  # called as kernel(logits, needs_grad=...)


def smooth_topk(
    logits: Tensor, masses: Masses, *, k: int, tau: float = 1.0, alpha: float | Tensor = 1.0, sums: bool = False
) -> Tensor:
    """Compute the smooth top-k loss sum_c q_c tau softplus((alpha_c - m_c / k) / tau) of each row.

    The mass q_c is the weight of class c in the target of the row. The margin m_c is the logit of class c minus the
    k-th largest logit of the other classes, smoothed: the result of ``topk_margins(logits, k, temperature=k * tau)``.
    If all masses of a row are 0, the loss and the gradient of the row are 0, even if its logits are NaN. If at most k
    logits of a row are above -inf, these classes are certainly in the top k. Then the loss is 0 if all mass is on these
    classes, and inf otherwise.

    The forward pass also computes the gradient. The backward pass only multiplies the gradient of each row by a number.

    Args:
        logits: tensor [B, n].
        masses: the target of the batch, see :class:`topk_registry.Masses`.
        k: as in "k-th largest logit", 1 <= k <= n - 1.
        tau: smoothing temperature, positive. Lower values approach a hard hinge.
        alpha: required margin, as one number or as one number per class [n]. ``alpha`` gets no gradient.
        sums: if True, the result may be the sum [] of the losses, because some backends compute the sum faster.

    Returns:
        Losses [B] or their sum [], in double precision for logits in double precision, else in single precision.
    """
    if (
        logits.is_nested
        or logits.layout is not torch.strided
        or not logits.is_floating_point()
        or logits.ndim < 1
        or not (type(k) is int and 1 <= k < logits.shape[-1] and 0 < k * tau < math.inf)
    ):
        check(logits, k, k * tau)
    masses.check(logits)
    if not isinstance(alpha, Tensor):
        alpha = torch.tensor(number(alpha, "alpha", at_least=0), dtype=torch.float64, device="cpu")
    elif alpha.ndim:
        _check_alpha(alpha, logits)
    if alpha.requires_grad:
        alpha = alpha.detach()
    options = {"masses": masses, "k": k, "tau": tau, "alpha": alpha}
    way = route(logits, alpha, *masses[:4])
    if way is Route.KERNELS and masses.needs_grad:
        way = Route.OPERATIONS  # only autograd computes the gradient with respect to masses
    if way is Route.OPERATIONS:
        return smooth_definition(logits, **options)
    if way is Route.GRAPH:
        # in compiled graphs without a kernel, the compiler fuses the operations of the definition
        if torch.compiler.is_compiling() and _backend(logits, k, tau, masses.has_labels_only) == "torch":
            return smooth_definition(logits, **options)
        return smooth_node(logits, *masses[:4], alpha, k, tau)[0]
    backend = _backend(logits, k, tau, masses.has_labels_only)
    kernel = partial(_kernel(backend), sums=sums, **options)
    return RowLosses.apply(logits, kernel, partial(smooth_definition, **options))  # pyright: ignore[reportReturnType]


def perturbed_hinge(
    logits: Tensor,
    masses: Masses,
    *,
    k: int,
    epsilon: float = 1.0,
    num_samples: int = 5,
    alpha: float | Tensor = 1.0,
    scale: float = 1.0,
    sums: bool = False,
) -> Tensor:
    """Return a hinge loss of the target against the k-th largest of logits plus noise, for each row s of the logits.

        loss = sum_c q_c scale max(0, alpha_c + f_eps(s) - s_c)

    Here, q_c is the mass of class c in the target of the row, and f_eps(s) is the result of :func:`perturbed_topk` with
    noise from the global generator of torch. If all masses of a row are 0, the loss and the gradient of this row are 0,
    even if logits are NaN. Second derivatives are 0. With ``create_graph=True``, the gradient is computed from the same
    random draws as the loss.

    Args:
        logits: tensor s [B, n].
        masses: the target of the batch, see :class:`topk_registry.Masses`.
        k: rank of the logit that the labels are compared with, 1 <= k <= n.
        epsilon: standard deviation of the noise, in units of the logits.
        num_samples: number of random draws.
        alpha: required margin: one number, or one number per class [n]. The margin gets no gradient.
        scale: factor of the loss.
        sums: if True, the result may be the sum [] of the losses, because some backends compute the sum faster.

    Returns:
        The losses [B] or their sum [], in the dtype of the logits, or in float32 for half-precision logits.
    """
    k, epsilon, num_samples = perturbed.checked_options(k, epsilon, num_samples)
    perturbed.check_shapes(logits, k, num_samples, None)
    masses.check(logits)
    if isinstance(alpha, Tensor):
        _check_alpha(alpha, logits)
        alpha = alpha.detach()
    options = {"masses": masses, "alpha": alpha, "scale": scale}
    draws = {"k": k, "epsilon": epsilon, "num_samples": num_samples}
    kernels = route(logits, *masses[:4]) is Route.KERNELS and not masses.needs_grad
    if not kernels or perturbed.backend_of(logits, k, epsilon) != "numba":
        return hinge_definition(logits, partial(perturbed.threshold, **draws), **options)
    seed = torch.randint(perturbed.SEEDS, (), device="cpu")
    cpu = load("topk_registry.ops.perturbed.cpu")
    kernel = partial(cpu.hinge, seed=seed, sums=sums, **draws, **options)
    again = partial(hinge_definition, threshold=partial(perturbed.threshold, seed=seed, **draws), **options)
    return RowLosses.apply(logits, kernel, again)  # pyright: ignore[reportReturnType]


def _check_alpha(alpha: Tensor, logits: Tensor) -> None:
    if alpha.shape != logits.shape[1:]:
        raise ValueError(f"alpha must be one number or one per class {list(logits.shape[1:])}, got {list(alpha.shape)}")
    check_device(alpha, "alpha", logits)


def smooth_definition(logits: Tensor, masses: Masses, k: int, tau: float, alpha: Tensor) -> Tensor:
    """Return the smooth top-k loss of each row [B], computed by differentiable PyTorch operations.

    The arguments and the loss are as in :func:`smooth_topk`. The losses are in double precision for logits in double
    precision, else in single precision.
    """
    tau = max(tau, LEAST_TEMPERATURE)
    s = logits.to(working_dtype(logits, k, k * tau))
    alpha = alpha.to(s)
    if masses.has_labels_only and masses.labels is not None and masses.shares is not None:
        shares = masses.shares.to(s.dtype)
        margins = graph.margins(torch.where(shares == 0, 0.0, s), k, k * tau)
        gap = alpha[masses.labels] if alpha.ndim else alpha
        losses = (shares * soft_hinge(gap - margins.gather(1, masses.labels) / k, tau))[:, 0]
    else:
        q = masses.table(s.shape[1], s.dtype)
        has_mass = (q != 0).any(1, keepdim=True)
        margins = graph.margins(torch.where(has_mass, s, 0.0), k, k * tau)
        hinge = soft_hinge(alpha - margins / k, tau)
        # a finite hinge is kept where the mass is 0, because the gradient with respect to the mass is the hinge
        losses = (q * hinge.masked_fill((q == 0) & ~hinge.isfinite(), 0.0)).sum(1)
    return losses.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def hinge_definition(
    logits: Tensor, threshold: Callable[[Tensor], Tensor], masses: Masses, alpha: float | Tensor, scale: float
) -> Tensor:
    """Return the losses [B] of :func:`perturbed_hinge`, computed by differentiable PyTorch operations.

    ``threshold(s)`` returns the perturbed k-th largest logit of each row of s.
    """
    scores = perturbed.wide(logits)
    labels, q = masses.labels, masses.shares
    if q is None or masses.even is not None:
        labels, q = None, masses.table(scores.shape[1], scores.dtype)
    q = q.to(scores.dtype)
    s = torch.where((q != 0).any(1, keepdim=True), scores, 0.0)
    gap = alpha.to(s) if isinstance(alpha, Tensor) else alpha
    if labels is not None and isinstance(gap, Tensor):
        gap = gap[labels]
    violation = (gap + threshold(s)[:, None] - (s if labels is None else s.gather(1, labels))).clamp(min=0)
    # If a mass is 0, the product is 0 even if the loss is infinite or NaN. Finite losses are kept, because the
    # gradient with respect to the mass is the loss.
    return (q * scale * violation.masked_fill((q == 0) & ~violation.isfinite(), 0.0)).sum(1)


def losses_and_gradient(
    logits: Tensor, masses: Masses, k: int, tau: float, alpha: Tensor, needs_grad: bool = True, sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the losses [B] of :func:`smooth_definition`, and their gradient with respect to the logits [B, n].

    If ``needs_grad`` is False, the second result is None. If ``sums`` is True, the first result is the sum of the
    losses. The rows are processed in blocks to limit memory.
    """
    losses, gradients = [], []
    for rows in blocks_of_rows(logits, k):
        with torch.set_grad_enabled(needs_grad):
            s = logits[rows].detach().requires_grad_(needs_grad)
            block = smooth_definition(s, masses.rows(rows), k, tau, alpha)
            total = block.sum()  # with grad_outputs for the losses, torch would import sympy, which takes half a second
        losses.append(block.detach())
        if needs_grad:
            gradients.append(torch.autograd.grad(total, s)[0])
    value = torch.cat(losses)
    return value.sum() if sums else value, torch.cat(gradients) if needs_grad else None


@cache
def _kernel(backend: str) -> Kernel:
    return losses_and_gradient if backend == "torch" else load(MODULES[backend]).losses


def _backend(logits: Tensor, k: int, tau: float, labels_only: bool) -> str:
    device = logits.device
    if logits.dtype == torch.float64 or 2 * k > logits.shape[1] or k * tau >= MAX_TEMPERATURE:
        return "torch"
    if device.type == "cpu" and k <= LARGEST_K["cpu"]:
        return choose(device, "numba", _labels_work if labels_only else _masses_work)
    if device.type == "cuda" and k <= LARGEST_K["cuda"]:
        return choose(device, "triton", _gpu_works)
    return "torch"


def usual_backend(operator: str, device: torch.device) -> str:
    """Return the backend of "ksubset" or "perturbed" on a device for float32 logits and default options."""
    scores = torch.empty(0, 100, device=device)
    if operator == "perturbed":
        return perturbed.backend_of(scores, 5, 1.0)
    return _backend(scores, 5, 0.1, True)


def _labels_work(device: torch.device) -> bool:
    return _works(device, has_even=False)


def _masses_work(device: torch.device) -> bool:
    return _works(device, has_even=True)


def _gpu_works(device: torch.device) -> bool:
    if not hasattr(load(MODULES["triton"]), "losses"):
        return False
    return _works(device, has_even=False) and _works(device, has_even=True)


def _works(device: torch.device, has_even: bool) -> bool:
    even = torch.full((3,), 0.01) if has_even else None
    masses = Masses(torch.tensor([[0], [6], [12]]), torch.ones(3, 1), even, None)
    s = torch.linspace(0, 30, 39).sin().view(3, 13)
    alpha = torch.ones(())
    expected = losses_and_gradient(s.double(), masses, 2, 0.25, alpha)
    on_device = Masses(*(None if t is None else t.to(device) for t in masses[:4]))
    kernel = _kernel("numba" if device.type == "cpu" else "triton")
    found = kernel(s.to(device), on_device, 2, 0.25, alpha.to(device))
    return all(
        a is not None and b is not None and torch.allclose(a.cpu().double(), b, rtol=1e-4, atol=1e-5)
        for a, b in zip(found, expected, strict=True)
    )


class RowLosses(torch.autograd.Function):
    """Losses [B] of logits [B, n], or the sum [] of the losses, computed by a kernel together with the gradient.

    ``kernel(logits, needs_grad=...)`` returns the losses [B] or their sum [], and the gradient [B, n] of the sum with
    respect to the logits. The gradient may be None if ``needs_grad`` is False.

    The forward pass stores the gradient, and the backward pass scales the stored gradient in place. A second backward
    pass through the same graph therefore calls the kernel again. If ``torch.autograd.grad`` is called with
    ``create_graph`` or ``is_grads_batched``, the backward pass differentiates ``definition(logits)`` instead.
    ``definition`` must return the losses [B] and use only differentiable operations.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, logits: Tensor, kernel: Kernel, definition: Callable[[Tensor], Tensor]
    ) -> Tensor:
        losses, ctx.gradient = kernel(logits, needs_grad=ctx.needs_input_grad[0])
        ctx.kernel, ctx.definition = kernel, definition
        ctx.save_for_backward(logits)
        return losses

    @staticmethod
    def backward(ctx, g: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (logits,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(g):
            return by_definition(ctx.definition, logits, g), None, None
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            gradient = ctx.kernel(logits, needs_grad=True)[1]
        return scaled_in_place(gradient, g, logits.dtype), None, None


def scaled_in_place(gradient: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply ``gradient`` [B, n] in place by ``g``, one factor [] or one per row [B]. Return it in ``dtype``."""
    # one number is usually 1, and then the gradient is not read or written
    if g.ndim and g.numel() and g.stride() == (0,):
        g = g[0]
    if g.ndim == 0 and g.is_cpu:
        factor = float(g)
        if factor != 1.0:
            gradient.mul_(factor)
    elif g.ndim == 0 and _scales(gradient):
        load("topk_registry.ops.gpu.scale").scale(gradient, g)  # reading g here would wait for the GPU
    else:
        gradient.mul_(g.to(gradient.dtype) if g.ndim == 0 else g.to(gradient.dtype)[:, None])
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _scales(gradient: Tensor) -> bool:
    if not gradient.is_cuda or not gradient.is_contiguous() or gradient.dtype == torch.float64:
        return False
    return _has_triton() and not too_old(gradient.device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@torch.library.custom_op("topk_registry::smooth_topk", mutates_args=())
def smooth_node(
    logits: Tensor, labels: Tensor | None, shares: Tensor | None, even: Tensor | None, dense: Tensor | None,
    alpha: Tensor, k: int, tau: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the losses [B] of :func:`smooth_topk` and their gradient [B, n], as one node of a compiled graph.

    ``labels``, ``shares``, ``even`` and ``dense`` define the weight of each class in the target of each row, as in
    :class:`Masses`. The backend is chosen when the graph runs.
    """
    masses = Masses(labels, shares, even, dense)
    kernel = _kernel(_backend(logits, k, tau, masses.has_labels_only))
    losses, gradient = kernel(logits, masses, k, tau, alpha)
    assert gradient is not None
    # contiguous, as the compiler expects: a GPU kernel returns a gradient in the memory layout of the logits
    return losses, gradient.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()


@smooth_node.register_fake
def _(logits, labels, shares, even, dense, alpha, k, tau):
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(logits.shape[0], dtype=dtype), logits.new_empty(logits.shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, *parts, ctx.k, ctx.tau = inputs
    ctx.save_for_backward(logits, *parts, output[1])


def _backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, *parts, alpha, gradient = ctx.saved_tensors
    if torch.is_grad_enabled():
        definition = partial(smooth_definition, masses=Masses(*parts), k=ctx.k, tau=ctx.tau, alpha=alpha)
        ds = by_definition(definition, logits, g)
    else:
        ds = (gradient * g[:, None]).to(logits.dtype)
    return ds, None, None, None, None, None, None, None


smooth_node.register_autograd(_backward, setup_context=_save)
