"""Check arguments, choose a backend, and call the perturbed top-k operator.

Torch operations take any noise, or make it by a generator. The other backends make theirs from a seed (backends.py).
"""

import math
from functools import partial

import torch
from torch import Generator, Tensor

from topk_registry.ops import constant
from topk_registry.ops.backend import check_name
from topk_registry.ops.constant import fixed_number
from topk_registry.ops.distributed import by_shards, generator_of_shard, is_distributed
from topk_registry.ops.perturbed import custom_ops
from topk_registry.ops.perturbed.autograd import PerturbedKth
from topk_registry.ops.perturbed.backends import OPERATOR, fits
from topk_registry.ops.perturbed.torch import backend as operations
from topk_registry.ops.tensors import Route, check_dense, route
from topk_registry.ops.values import integer, number

SEEDS = 2**63 - 1


def perturbed_topk(
    scores: Tensor,
    k: int,
    *,
    epsilon: float = 1.0,
    num_samples: int = 5,
    generator: Generator | None = None,
    noise: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """The k-th largest score smoothed by Gaussian noise, estimated without bias from a few draws.

        f_eps(s) = E[(s + eps Z)_[k]],   grad f_eps(s) = E[one-hot of the class that is k-th in s + eps Z]

    Value and gradient are means over the same draws of Z ~ N(0, I). ``epsilon=0`` is the plain k-th largest. A row with
    a NaN gives NaN for that row only.

    The noise for a seed depends on the implementation. ``"torch"`` fills tensors with it. ``"numba"`` and
    ``"triton"`` take one number from the generator at each call, and their noise is a function of that number, the
    row's place, the draw and the class: the same for any number of threads, and whatever the scores and the other
    rows are.

    Args:
        scores: floating point [..., n].
        k: which largest, 1 <= k <= n.
        epsilon: standard deviation of the noise, in the unit of the scores.
        num_samples: how many draws B.
        generator: where the noise comes from, on the device of the scores; without it, torch's global generator.
        noise: the draws themselves [B, ..., n], instead of random ones.
        impl: ``"auto"``, the fastest that is installed for the device of the scores; ``"numba"``, on the CPU;
            ``"triton"``, on GPUs; or ``"torch"``, which also serves where the kernels cannot, as with given noise.

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
    k, epsilon, num_samples = checked_options(k, epsilon, num_samples, impl)
    _check_shapes(scores, k, num_samples, noise)
    if is_distributed(scores):
        own = generator_of_shard(scores, generator) if noise is None else None
        options = {"epsilon": epsilon, "num_samples": num_samples, "generator": own, "impl": impl}
        return by_shards(lambda s, z: perturbed_topk(s, k, noise=z, **options), scores, noise, axis=1)
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    rows = wide.reshape(math.prod(scores.shape[:-1]), scores.shape[-1])
    if noise is not None:
        noise = noise.detach().to(rows).reshape(num_samples, *rows.shape)
    value = _mean_kth(rows, k, float(epsilon), num_samples, generator, noise, impl)
    return value.reshape(scores.shape[:-1])


def _mean_kth(
    rows: Tensor,
    k: int,
    epsilon: float,
    num_samples: int,
    generator: Generator | None,
    noise: Tensor | None,
    impl: str,
) -> Tensor:
    backend = constant.choose(OPERATOR, impl, rows.device) if fits(rows, k, epsilon, noise) else "torch"
    way = route(rows, noise)
    if backend == "torch" or way is Route.OPERATIONS:
        options = {"k": k, "epsilon": epsilon, "num_samples": num_samples, "generator": generator, "noise": noise}
        if way is not Route.KERNELS:
            return operations.differentiable_kth(rows, **options)
        return PerturbedKth.apply(rows, partial(operations.perturbed_kth, **options))[0]
    seed = torch.randint(SEEDS, (), generator=generator, device=rows.device)
    if way is Route.GRAPH:
        return custom_ops.perturbed_kth(rows, seed, k, epsilon, num_samples, backend)[0]
    options = {"seed": seed, "k": k, "epsilon": epsilon, "num_samples": num_samples}
    return PerturbedKth.apply(rows, partial(OPERATOR[backend].kernels().perturbed_kth, **options))[0]


def checked_options(k: int, epsilon: float, num_samples: int, impl: str) -> tuple[int, float, int]:
    """Return k, epsilon and num_samples; raise unless they are possible for some scores."""
    check_name(impl, "impl")
    k, num_samples = integer(k, "k", at_least=1), integer(num_samples, "num_samples", at_least=1)
    return k, number(fixed_number(epsilon), "epsilon", at_least=0), num_samples


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
