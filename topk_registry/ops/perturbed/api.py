"""The perturbed top-k operator: the checked entrance, the choice of the backend, and a node of compiled graphs."""

import math
from typing import Any

import torch
from torch import Generator, Tensor

from topk_registry.checks import integer, number
from topk_registry.ops.backend import Route, check_dense, choose, load, route
from topk_registry.ops.perturbed import definition

SEEDS = 2**63 - 1
EPSILONS = 1e-30, 1e30  # range of epsilon in which kernels can divide by epsilon in float32
KERNELS = {"cpu": "numba", "cuda": "triton"}
GPU_MAX_N = 16384  # longest row that fits into the registers of one program together with the noise
GPU_MAX_K = 64  # the GPU kernel takes k maxima one after the other, which is slow for large k


def perturbed_topk(
    logits: Tensor,
    k: int,
    *,
    epsilon: float = 1.0,
    num_samples: int = 5,
    generator: Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Estimate the expected k-th largest of logits plus Gaussian noise, for each row of logits.

        f_eps(s) = E[(s + eps Z)_[k]],   grad f_eps(s) = E[one-hot of the class that is k-th in s + eps Z]

    Here, (x)_[k] is the k-th largest entry of x, and Z is standard normal noise. The result and the gradient are
    unbiased estimates: both are means over the same random draws of Z. With ``epsilon=0``, the result is the k-th
    largest logit without noise. If a row contains NaN, the result of this row is NaN.

    With the same seed of the generator, two backends generate different noise. PyTorch operations generate a tensor of
    noise per draw. The kernels take one random number per call from the generator. Each noise value is a function of
    this number, the row index, the draw and the class.

    Args:
        logits: floating-point tensor [..., n].
        k: rank of the logit, where 1 is the largest, 1 <= k <= n.
        epsilon: standard deviation of the noise, in units of the logits.
        num_samples: number of random draws.
        generator: source of the noise, on the device of the logits. Default: the global generator of torch.
        noise: values of Z to use instead of random draws, [num_samples, ..., n].

    Returns:
        The estimate [...], differentiable. It has the dtype of the logits, or float32 for half-precision logits.

    Example:
        >>> logits = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
        >>> perturbed_topk(logits, 2, epsilon=1.0, noise=torch.eye(3)[[0, 1]] * 1.5, num_samples=2)
        tensor(2.2500, grad_fn=<ViewBackward0>)

    Reference:
        Garcin, Servajean, Joly, Salmon. Stochastic smoothing of the top-K calibrated hinge loss for deep imbalanced
        classification. ICML 2022.
    """
    k, epsilon, num_samples = checked_options(k, epsilon, num_samples)
    check_shapes(logits, k, num_samples, noise)
    rows = wide(logits).reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    if noise is not None:
        noise = noise.detach().to(rows).reshape(num_samples, *rows.shape)
    return threshold(rows, k, epsilon, num_samples, generator, noise).reshape(logits.shape[:-1])


def threshold(
    rows: Tensor,
    k: int,
    epsilon: float,
    num_samples: int,
    generator: Generator | None = None,
    noise: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """Return the result of :func:`perturbed_topk` for logits [B, n]: [B]. ``seed`` [] determines the noise."""
    backend = backend_of(rows, k, epsilon, noise)
    if backend == "torch" or route(rows, noise) is Route.OPERATIONS:
        return definition.kth(rows, k, epsilon, num_samples, generator, noise)
    if seed is None:
        seed = torch.randint(SEEDS, (), generator=generator, device=rows.device)
    return perturbed_kth(rows, seed, k, epsilon, num_samples, backend)[0]


def backend_of(rows: Tensor, k: int, epsilon: float, noise: Tensor | None = None) -> str:
    """Return the backend for logits [B, n]."""
    # kernels generate the noise themselves, in float32
    n, device = rows.shape[-1], rows.device
    fits = noise is None and EPSILONS[0] <= epsilon <= EPSILONS[1] and rows.dtype != torch.float64
    if device.type == "cuda":
        fits = fits and n <= GPU_MAX_N and k <= GPU_MAX_K
    return choose(device, KERNELS.get(device.type) if fits else None, _works)


@torch.library.custom_op("topk_registry::perturbed_kth", mutates_args=())
def perturbed_kth(
    logits: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Call ``kth`` of a backend: return the k-th largest perturbed logits [B] and their classes [B, num_samples]."""
    return kernel(backend)(logits, seed, k, epsilon, num_samples)


def kernel(backend: str) -> Any:
    """Return the function ``kth`` of the backend "numba" or "triton"."""
    return load("topk_registry.ops.perturbed." + {"numba": "cpu", "triton": "triton"}[backend]).kth


@perturbed_kth.register_fake
def _(logits: Tensor, seed: Tensor, k: int, epsilon: float, num_samples: int, backend: str) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[0]), logits.new_empty((logits.shape[0], num_samples), dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    value, index = output
    ctx.n = inputs[0].shape[1]
    ctx.mark_non_differentiable(index)
    ctx.save_for_backward(index, value.isnan())


def _spread(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    index, invalid = ctx.saved_tensors
    share = (grad / index.shape[1]).masked_fill(invalid, torch.nan)
    spread = grad.new_zeros(len(grad), ctx.n).scatter_add_(1, index, share[:, None].expand_as(index))
    return spread, None, None, None, None, None


perturbed_kth.register_autograd(_spread, setup_context=_keep)


def _works(device: torch.device) -> bool:
    # with negligible noise, a kernel must find the second largest of 13 logits
    logits = torch.linspace(0, 30, 39).sin().view(3, 13).to(device)
    kth = kernel(KERNELS[device.type])
    value, index = kth(logits, torch.zeros((), dtype=torch.int64, device=device), 2, 1e-20, 2)
    expected, where = (x[:, 1] for x in logits.topk(2))
    return torch.allclose(value, expected) and bool((index == where[:, None]).all())


def checked_options(k: int, epsilon: float, num_samples: int) -> tuple[int, float, int]:
    """Return the options as int, float and int. Raise a ValueError unless 1 <= k, 0 <= epsilon and 1 <= num_samples."""
    k, num_samples = integer(k, "k", at_least=1), integer(num_samples, "num_samples", at_least=1)
    return k, number(epsilon, "epsilon", at_least=0), num_samples


def wide(logits: Tensor) -> Tensor:
    """Return logits in half precision in single precision, and other logits as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def check_shapes(logits: Tensor, k: int, num_samples: int, noise: Tensor | None) -> None:
    """Raise a ValueError unless the logits are a dense floating-point tensor [..., n], n >= k, and the noise fits."""
    check_dense(logits, "logits")
    if logits.ndim < 1 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point [..., n], got {logits.dtype} {list(logits.shape)}")
    if k > logits.shape[-1]:
        raise ValueError(f"k must be at most the number of logits in a row: k = {k}, logits {list(logits.shape)}")
    if noise is not None and noise.shape != (num_samples, *logits.shape):
        raise ValueError(
            f"noise must be [num_samples, *logits.shape] = {[num_samples, *logits.shape]}, got {list(noise.shape)}"
        )
