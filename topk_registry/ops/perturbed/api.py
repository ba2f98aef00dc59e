"""Public functions of the perturbed top-k operator: check of arguments, and choice of the backend."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from topk_registry.ops.backend import choose, load
from topk_registry.ops.fused import Fused
from topk_registry.ops.perturbed import custom_op, definition
from topk_registry.ops.tensors import Route, check_dense, route
from topk_registry.ops.values import integer, number

SEEDS = 2**63 - 1
EPSILONS = 1e-30, 1e30  # range in which single precision can divide by epsilon
KERNELS = {"cpu": "numba", "cuda": "triton"}
GPU_MAX_N = 16384  # largest row that fits with its noise into the registers of one program
GPU_MAX_K = 64  # number of maxima to take


def perturbed_topk(
    scores: Tensor,
    k: int,
    *,
    epsilon: float = 1.0,
    num_samples: int = 5,
    generator: Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Return the k-th largest score smoothed by Gaussian noise: an unbiased estimate from a few draws.

        f_eps(s) = E[(s + eps Z)_[k]],   grad f_eps(s) = E[one-hot of the class that is k-th in s + eps Z]

    Value and gradient are means over the same draws of Z ~ N(0, I). With ``epsilon=0``, the result is the plain k-th
    largest score. A row with NaN gives NaN for this row only.

    The same generator gives different noise on different backends. PyTorch operations fill whole tensors with noise
    from the generator. Kernels take one number per call from the generator. They compute the noise from this number,
    the row index, the draw and the class. This noise does not depend on the number of threads, the scores or the other
    rows.

    Args:
        scores: floating point [..., n].
        k: rank of the score, where 1 is the largest, 1 <= k <= n.
        epsilon: standard deviation of the noise, in units of the scores.
        num_samples: number of draws B.
        generator: source of the noise, on the device of the scores. Default: the global generator of torch.
        noise: fixed draws [B, ..., n] in place of random draws.

    Returns:
        The estimate [...], differentiable, in single precision for half-precision scores.

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
    labels: Tensor,
    shares: Tensor,
    *,
    k: int,
    epsilon: float = 1.0,
    num_samples: int = 5,
    alpha: float | Tensor = 1.0,
    scale: float = 1.0,
    sums: bool = False,
) -> Tensor:
    """Return sum_j q_j scale (alpha_{y_j} + f_eps(s) - s_{y_j})_+ per row, f_eps(s) as in :func:`perturbed_topk`.

    The noise comes from the global generator of torch. A row without mass has loss 0 and gradient 0 for any logits.
    Second derivatives are 0. A gradient under ``create_graph=True`` uses the same draws.

    Args:
        logits: scores [B, n].
        labels: classes y [B, m], each in [0, n).
        shares: masses q of the labels [B, m].
        k: rank of the score that labels are compared with, 1 <= k <= n.
        epsilon: standard deviation of the noise, in units of the scores.
        num_samples: number of draws that estimate the expectation and the gradient.
        alpha: required margin: one number, or one per class [n]. The margin gets no gradient.
        scale: factor of the loss.
        sums: allow kernels to return the sum of the losses [] with one graph node.

    Returns:
        Losses [B], in single precision for half-precision logits, else in the dtype of the logits.
    """
    k, epsilon, num_samples = checked_options(k, epsilon, num_samples)
    _check_shapes(logits, k, num_samples, None)
    if isinstance(alpha, Tensor):
        if alpha.shape != logits.shape[1:]:
            raise ValueError(f"alpha must be one number or one per class [{logits.shape[1]}], got {list(alpha.shape)}")
        alpha = alpha.detach()
    threshold = partial(_threshold, k=k, epsilon=epsilon, num_samples=num_samples)
    kernels = route(logits, labels, shares) is Route.KERNELS and not shares.requires_grad
    if not kernels or _backend(logits, k, epsilon, None) != "numba":
        return _hinges(logits, threshold, labels, shares, alpha, scale)
    seed = torch.randint(SEEDS, ())
    options = {"k": k, "epsilon": epsilon, "num_samples": num_samples, "alpha": alpha, "scale": scale}
    kernel = partial(load("topk_registry.ops.perturbed.cpu").hinge, labels=labels, shares=shares, seed=seed, **options)
    again = partial(
        _hinges, threshold=partial(threshold, seed=seed), labels=labels, shares=shares, alpha=alpha, scale=scale
    )
    return Fused.apply(logits, kernel, again, sums)  # pyright: ignore[reportReturnType]


def _hinges(
    logits: Tensor,
    threshold: Callable[[Tensor], Tensor],
    labels: Tensor,
    shares: Tensor,
    alpha: float | Tensor,
    scale: float,
) -> Tensor:
    s = torch.where((shares != 0).any(1, keepdim=True), _wide(logits), 0.0)
    q, gap = shares.to(s.dtype), alpha.to(s)[labels] if isinstance(alpha, Tensor) else alpha
    violation = (gap + threshold(s)[:, None] - s.gather(1, labels)).clamp(min=0)
    # 0 * inf is NaN; finite losses stay in the product, because they are the gradient of the mass
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
    """Return the backend for a call. Kernels draw their own noise, in single precision."""
    n, device = rows.shape[-1], rows.device
    fits = noise is None and EPSILONS[0] <= epsilon <= EPSILONS[1] and rows.dtype != torch.float64
    if device.type == "cuda":
        fits = fits and n <= GPU_MAX_N and k <= GPU_MAX_K
    return choose(device, KERNELS.get(device.type) if fits else None, _works)


def usual_backend(device: torch.device) -> str:
    """Return the backend for a default call on a device."""
    return _backend(torch.empty(1, 10, device=device), 5, 1.0, None)


def _works(device: torch.device) -> bool:
    """Return whether the kernels of a device find the second largest score if the noise is negligible."""
    scores = torch.linspace(0, 30, 39).sin().view(3, 13).to(device)
    kernel = custom_op.kernel(KERNELS[device.type])
    value, index = kernel(scores, torch.zeros((), dtype=torch.int64, device=device), 2, 1e-20, 2)
    expected, where = (x[:, 1] for x in scores.topk(2))
    return torch.allclose(value, expected) and bool((index == where[:, None]).all())


def checked_options(k: int, epsilon: float, num_samples: int) -> tuple[int, float, int]:
    """Return k, epsilon and num_samples. Raise unless these options are valid for some scores."""
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
