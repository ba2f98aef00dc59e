"""Functions with the same result: a Triton kernel, and the compiled definition in PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.gpu.scale import scale
from topk_registry.ops.ksubset.triton import backend
from topk_registry.ops.losses import smooth_definition
from topk_registry.ops.masses import Masses
from topk_registry.ops.perturbed import definition
from topk_registry.ops.perturbed.triton import kth

TAU, EPSILON, DRAWS = 0.1, 0.01, 5
# the standard deviation of the scores; in flat rows, no class has large odds, and the kernel is done early
SPREADS = {"rows with large odds": 1.0, "flat rows": 0.1}
TOLERANCE = 0.01  # of losses of about 1, for gradients in bfloat16 and for random thresholds

Step = Callable[[], Any]
Forms = dict[str, dict[str, Step]]  # for each kind of input: the functions "kernel" and "definition"
Compiler = Callable[[Callable], Callable]


def cases(
    device: str, shapes: tuple[tuple[int, int], ...], k: int, half: torch.dtype, compiled: Compiler
) -> dict[str, Callable[[], Forms]]:
    """Return one function per kernel and shape, which returns the functions to compare.

    Args:
        device: device of the kernels.
        shapes: batch size and number of classes, for short rows and for long rows.
        k: as in top-k.
        half: dtype of the long rows.
        compiled: function that compiles a function.
    """
    (rows, n), long = shapes
    short, single = partial(smooth_topk, device, rows, n, k, torch.float32), f"{rows} x {n}, float32"
    wide, name = partial(smooth_topk, device, *long, k, half), f"{long[0]} x {long[1]}, {str(half)[6:]}"
    return {
        f"smooth_topk, labels, {single}": partial(short, "labels", compiled),
        f"smooth_topk, smoothed labels, {single}": partial(short, "smoothed labels", compiled),
        f"perturbed_topk, {single}": partial(perturbed_topk, device, rows, n, k, compiled),
        f"scale of a gradient, {single}": partial(scales, device, rows, n, compiled),
        f"smooth_topk, labels, {name}": partial(wide, "labels", compiled),
        f"smooth_topk, distribution, {single}": partial(short, "distribution", compiled),
        f"smooth_topk, mixture, {single}": partial(short, "mixture", compiled),
        f"smooth_topk, smoothed labels, {name}": partial(wide, "smoothed labels", compiled),
    }


def smooth_topk(device: str, rows: int, n: int, k: int, dtype: torch.dtype, kind: str, compiled: Compiler) -> Forms:
    """Return functions for the losses [B] and the gradient [B, n]."""
    masses, alpha = masses_of(kind, rows, n, device), torch.ones(())
    forward = compiled(partial(smooth_definition, masses=masses, k=k, tau=TAU, alpha=alpha.to(device)))

    def by_definition(leaf: Tensor) -> tuple[Tensor, Tensor]:
        losses = forward(leaf)
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

    forms: Forms = {}
    for inputs, spread in SPREADS.items():
        logits = (spread * torch.randn(rows, n, device=device)).to(dtype)
        leaf = logits.clone().requires_grad_()
        kernel = partial(backend.losses, logits, masses, k, TAU, alpha)
        forms[inputs] = {"kernel": kernel, "definition": partial(by_definition, leaf)}
    return forms


def perturbed_topk(device: str, rows: int, n: int, k: int, compiled: Compiler) -> Forms:
    """Return functions for the mean [] over equal rows of the perturbed (k + 1)-th largest score."""
    scores, seed = torch.randn(1, n, device=device).expand(rows, n).contiguous(), torch.tensor(0, device=device)
    options = {"k": k + 1, "epsilon": EPSILON, "num_samples": DRAWS}
    forward = compiled(partial(definition.kth, generator=None, noise=None, **options))
    return {
        "equal rows": {
            "kernel": lambda: (kth(scores, seed, **options)[0].mean(),),
            "definition": lambda: (forward(scores).mean(),),
        }
    }


def scales(device: str, rows: int, n: int, compiled: Compiler) -> Forms:
    """Return functions that multiply a gradient in place by a number in the memory of the GPU."""
    multiply = compiled(Tensor.mul_)
    forms: Forms = {}
    for factor in (1.0, -1.0):
        one, g = torch.randn(rows, n, device=device), torch.tensor(factor, device=device)
        kernel, definition = partial(_scaled, scale, one, g), partial(_scaled, multiply, one.clone(), g)
        forms[f"factor {factor:g}"] = {"kernel": kernel, "definition": definition}
    return forms


def _scaled(multiply: Callable[[Tensor, Tensor], object], gradient: Tensor, g: Tensor) -> tuple[Tensor]:
    multiply(gradient, g)
    return (gradient,)


def masses_of(kind: str, rows: int, n: int, device: str) -> Masses:
    """Return the masses of a kind of target, in the dtypes in which :meth:`Masses.of` returns them on a GPU."""
    labels = torch.randint(n, (rows, 2 if kind == "mixture" else 1), device=device)
    shares = torch.full(labels.shape, 1 / labels.shape[1], dtype=torch.float64, device=device)
    if kind == "distribution":
        return Masses(None, None, None, torch.rand(rows, n, device=device).softmax(1))
    if kind == "smoothed labels":
        return Masses(labels, 0.9 * shares, 0.1 / n * shares[:, 0], None)
    if kind in ("labels", "mixture"):
        return Masses(labels, shares, None, None)
    raise ValueError(f"kind must be labels, smoothed labels, mixture or distribution, got {kind!r}")


def difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest difference between the numbers of two results. Raise a ValueError if it is too large."""
    largest = max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, expected, strict=True))
    if not largest <= TOLERANCE:
        raise ValueError(f"the kernel and the definition differ by {largest}, expected at most {TOLERANCE}")
    return largest
