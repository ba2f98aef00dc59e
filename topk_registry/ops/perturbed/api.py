"""Public functions of the perturbed top-k operator. They check the arguments and choose the backend."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from topk_registry.ops.backend import choose, load
from topk_registry.ops.fused import Fused
from topk_registry.ops.parts import Parts
from topk_registry.ops.perturbed import custom_op, definition
from topk_registry.ops.tensors import Route, check_dense, check_device, route
from topk_registry.ops.values import integer, number

SEEDS = 2**63 - 1
EPSILONS = 1e-30, 1e30  # range of epsilon in which kernels can divide by epsilon in float32
KERNELS = {"cpu": "numba", "cuda": "triton"}
GPU_MAX_N = 16384  # longest row that fits into the registers of one program together with the noise
GPU_MAX_K = 64  # the GPU kernel takes k maxima one after the other, which is slow for large k


def perturbed_topk(
    scores: Tensor,
    k: int,
    *,
    epsilon: float = 1.0,
    num_samples: int = 5,
    generator: Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Estimate the expected k-th largest of scores plus Gaussian noise, for each row of scores.

        f_eps(s) = E[(s + eps Z)_[k]],   grad f_eps(s) = E[one-hot of the class that is k-th in s + eps Z]

    Here, (x)_[k] is the k-th largest entry of x, and Z is standard normal noise. The result and the gradient are
    unbiased estimates: both are means over the same random draws of Z. With ``epsilon=0``, the result is the k-th
    largest score without noise. If a row contains NaN, the result of this row is NaN.

    With the same seed of the generator, two backends generate different noise. PyTorch operations generate a tensor of
    noise per draw. The kernels take one random number per call from the generator. Each noise value is a function of
    this number, the row index, the draw and the class.

    Args:
        scores: floating-point tensor [..., n].
        k: rank of the score, where 1 is the largest, 1 <= k <= n.
        epsilon: standard deviation of the noise, in units of the scores.
        num_samples: number of random draws.
        generator: source of the noise, on the device of the scores. Default: the global generator of torch.
        noise: values of Z to use instead of random draws, [num_samples, ..., n].

    Returns:
        The estimate [...], differentiable. It has the dtype of the scores, or float32 for half-precision scores.

    Example:
        >>> scores = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
        >>> perturbed_topk(scores, 2, epsilon=1.0, noise=torch.eye(3)[[0, 1]] * 1.5, num_samples=2)
        tensor(2.2500, grad_fn=<ViewBackward0>)

    Reference:
        Garcin, Servajean, Joly, Salmon. Stochastic smoothing of the top-K calibrated hinge loss for deep imbalanced
        classification. ICML 2022.
    """
    k, epsilon, num_samples = checked_options(k, epsilon, num_samples)
    _check_shapes(scores, k, num_samples, noise)
    rows = _wide(scores).reshape(math.prod(scores.shape[:-1]), scores.shape[-1])
    if noise is not None:
        noise = noise.detach().to(rows).reshape(num_samples, *rows.shape)
    return _threshold(rows, k, epsilon, num_samples, generator, noise).reshape(scores.shape[:-1])


def perturbed_hinge(
    logits: Tensor,
    masses: Any,
    *,
    k: int,
    epsilon: float = 1.0,
    num_samples: int = 5,
    alpha: float | Tensor = 1.0,
    scale: float = 1.0,
    sums: bool = False,
) -> Tensor:
    """Return a hinge loss of the target against the k-th largest of scores plus noise, for each row s of the logits.

        loss = sum_c q_c scale max(0, alpha_c + f_eps(s) - s_c)

    Here, q_c is the mass of class c in the target of the row, and f_eps(s) is the result of :func:`perturbed_topk` with
    noise from the global generator of torch. If all masses of a row are 0, the loss and the gradient of this row are 0,
    even if logits are NaN. Second derivatives are 0. With ``create_graph=True``, the gradient is computed from the same
    random draws as the loss.

    Args:
        logits: scores s [B, n].
        masses: object with the attributes ``labels``, ``shares``, ``even`` and ``dense``, as in :func:`smooth_topk`.
        k: rank of the score that the labels are compared with, 1 <= k <= n.
        epsilon: standard deviation of the noise, in units of the scores.
        num_samples: number of random draws.
        alpha: required margin: one number, or one number per class [n]. The margin gets no gradient.
        scale: factor of the loss.
        sums: if True, the result may be the sum [] of the losses, because some backends compute the sum faster.

    Returns:
        The losses [B] or their sum [], in the dtype of the logits, or in float32 for half-precision logits.
    """
    k, epsilon, num_samples = checked_options(k, epsilon, num_samples)
    _check_shapes(logits, k, num_samples, None)
    parts = Parts.of(masses, logits)
    if isinstance(alpha, Tensor):
        if alpha.shape != logits.shape[1:]:
            raise ValueError(f"alpha must be one number or one per class [{logits.shape[1]}], got {list(alpha.shape)}")
        check_device(alpha, "alpha", logits)
        alpha = alpha.detach()
    threshold = partial(_threshold, k=k, epsilon=epsilon, num_samples=num_samples)
    kernels = route(logits, *parts) is Route.KERNELS and not parts.needs_grad
    if not kernels or _backend(logits, k, epsilon, None) != "numba":
        return _hinges(logits, threshold, parts, alpha, scale)
    seed = torch.randint(SEEDS, (), device="cpu")
    cpu, options = load("topk_registry.ops.perturbed.cpu"), {"parts": parts, "alpha": alpha, "scale": scale}
    kernel = partial(cpu.hinge, seed=seed, k=k, epsilon=epsilon, num_samples=num_samples, sums=sums, **options)
    again = partial(_hinges, threshold=partial(threshold, seed=seed), **options)
    return Fused.apply(logits, kernel, again)  # pyright: ignore[reportReturnType]


def _hinges(
    logits: Tensor, threshold: Callable[[Tensor], Tensor], parts: Parts, alpha: float | Tensor, scale: float
) -> Tensor:
    wide = _wide(logits)
    labels, q = parts.labels, parts.shares
    if q is None or parts.even is not None:
        labels, q = None, parts.table(wide.shape[1], wide.dtype)
    q = q.to(wide.dtype)
    s = torch.where((q != 0).any(1, keepdim=True), wide, 0.0)
    gap = alpha.to(s) if isinstance(alpha, Tensor) else alpha
    if labels is not None and isinstance(gap, Tensor):
        gap = gap[labels]
    violation = (gap + threshold(s)[:, None] - (s if labels is None else s.gather(1, labels))).clamp(min=0)
    # If a mass is 0, the product is 0 even if the loss is infinite or NaN. Finite losses are kept, because the
    # gradient with respect to the mass is the loss.
    return (q * scale * violation.masked_fill((q == 0) & ~violation.isfinite(), 0.0)).sum(1)


def _threshold(
    rows: Tensor,
    k: int,
    epsilon: float,
    num_samples: int,
    generator: Generator | None = None,
    noise: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    backend = _backend(rows, k, epsilon, noise)
    if backend == "torch" or route(rows, noise) is Route.OPERATIONS:
        return definition.kth(rows, k, epsilon, num_samples, generator, noise)
    if seed is None:
        seed = torch.randint(SEEDS, (), generator=generator, device=rows.device)
    return custom_op.perturbed_kth(rows, seed, k, epsilon, num_samples, backend)[0]


def _backend(rows: Tensor, k: int, epsilon: float, noise: Tensor | None) -> str:
    # kernels generate the noise themselves, in float32
    n, device = rows.shape[-1], rows.device
    fits = noise is None and EPSILONS[0] <= epsilon <= EPSILONS[1] and rows.dtype != torch.float64
    if device.type == "cuda":
        fits = fits and n <= GPU_MAX_N and k <= GPU_MAX_K
    return choose(device, KERNELS.get(device.type) if fits else None, _works)


def usual_backend(device: torch.device) -> str:
    """Return the backend that :func:`perturbed_topk` uses on a device for a few scores, k = 5 and default options."""
    return _backend(torch.empty(1, 10, device=device), 5, 1.0, None)


def _works(device: torch.device) -> bool:
    # with negligible noise, a kernel must find the second largest of 13 scores
    scores = torch.linspace(0, 30, 39).sin().view(3, 13).to(device)
    kernel = custom_op.kernel(KERNELS[device.type])
    value, index = kernel(scores, torch.zeros((), dtype=torch.int64, device=device), 2, 1e-20, 2)
    expected, where = (x[:, 1] for x in scores.topk(2))
    return torch.allclose(value, expected) and bool((index == where[:, None]).all())


def checked_options(k: int, epsilon: float, num_samples: int) -> tuple[int, float, int]:
    """Return the options as int, float and int. Raise a ValueError unless 1 <= k, 0 <= epsilon and 1 <= num_samples."""
    k, num_samples = integer(k, "k", at_least=1), integer(num_samples, "num_samples", at_least=1)
    return k, number(epsilon, "epsilon", at_least=0), num_samples


def _wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


def _check_shapes(scores: Tensor, k: int, num_samples: int, noise: Tensor | None) -> None:
    check_dense(scores, "scores")
    if scores.ndim < 1 or not scores.is_floating_point():
        raise ValueError(f"scores must be floating point [..., n], got {scores.dtype} {list(scores.shape)}")
    if k > scores.shape[-1]:
        raise ValueError(f"k must be at most the number of scores in a row: k = {k}, scores {list(scores.shape)}")
    if noise is not None and noise.shape != (num_samples, *scores.shape):
        raise ValueError(
            f"noise must be [num_samples, *scores.shape] = {[num_samples, *scores.shape]}, got {list(noise.shape)}"
        )
