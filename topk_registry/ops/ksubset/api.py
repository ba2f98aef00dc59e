"""Public functions of the k-subset operator: probabilities and margins of all classes, and the smooth top-k loss."""

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.backend import choose, load
from topk_registry.ops.fused import Fused
from topk_registry.ops.ksubset import autograd, graph
from topk_registry.ops.ksubset.custom_op import smooth_topk as in_graph
from topk_registry.ops.parts import Parts
from topk_registry.ops.tensors import Route, check_dense, check_device, route
from topk_registry.ops.values import number

LARGEST_K = {"cpu": 64, "cuda": 10}  # largest k for which there are kernels
MAX_TEMPERATURE = 1e30  # above this temperature, margins overflow in single precision


def smooth_topk(
    logits: Tensor, masses: Any, *, k: int, tau: float = 1.0, alpha: float | Tensor = 1.0, sums: bool = False
) -> Tensor:
    """Compute the smooth top-k loss sum_c q_c tau softplus((alpha_c - m_c / k) / tau) of each row.

    The mass q_c is the weight of class c in the target of the row. The margin m_c is the score of class c minus the
    k-th largest score of the other classes, smoothed: the result of ``topk_margins(logits, k, temperature=k * tau)``.
    If all masses of a row are 0, the loss and the gradient of the row are 0, even if its logits are NaN. If at most k
    logits of a row are above -inf, these classes are certainly in the top k. Then the loss is 0 if all mass is on these
    classes, and inf otherwise.

    The forward pass also computes the gradient. The backward pass only multiplies the gradient of each row by a number.

    Args:
        logits: scores [B, n].
        masses: object with four attributes, such as :class:`losses.targets.Masses`. ``dense`` [B, n] holds the masses
            of all classes. ``shares`` [B, m] holds the masses of the classes in ``labels`` [B, m], and ``even`` [B] is
            a mass that every class has in addition. An attribute that is not needed is None.
        k: as in "k-th largest score", 1 <= k <= n - 1.
        tau: smoothing temperature, positive. Lower values approach a hard hinge.
        alpha: required margin, as one number or as one number per class [n]. ``alpha`` gets no gradient.
        sums: if True, the result may be the sum [] of the losses, because some backends compute the sum faster.

    Returns:
        Losses [B] or their sum [], in double precision for logits in double precision, else in single precision.
    """
    check(logits, k, k * tau)
    parts = Parts.of(masses, logits)
    if not isinstance(alpha, Tensor):
        alpha = torch.tensor(number(alpha, "alpha", at_least=0), dtype=torch.float64, device="cpu")
    if alpha.ndim and alpha.shape != logits.shape[1:]:
        raise ValueError(f"alpha must be one number or one per class {list(logits.shape[1:])}, got {list(alpha.shape)}")
    if alpha.ndim:
        check_device(alpha, "alpha", logits)
    if alpha.requires_grad:
        alpha = alpha.detach()
    way = route(logits, alpha, *parts)
    if way is Route.KERNELS and parts.needs_grad:
        way = Route.OPERATIONS  # only autograd computes the gradient with respect to masses
    definition = partial(autograd.losses_of, parts=parts, k=k, tau=tau, alpha=alpha)
    if way is Route.GRAPH:
        if not torch.compiler.is_compiling() or _backend(logits, k, tau, parts.has_labels_only) != "torch":
            return in_graph(logits, *parts, alpha, k, tau)[0]
        way = Route.OPERATIONS  # in compiled graphs, the compiler fuses these operations
    if way is Route.OPERATIONS:
        return definition(logits)
    kernel = partial(run, masses=masses, parts=parts, k=k, tau=tau, alpha=alpha, sums=sums)
    return Fused.apply(logits, kernel, definition)  # pyright: ignore[reportReturnType]


def run(
    logits: Tensor, needs_grad: bool, *, masses: Any, parts: Parts, k: int, tau: float, alpha: Tensor, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses [B] of :func:`smooth_topk` and their gradient [B, n] with numba, Triton or PyTorch operations.

    The gradient is with respect to the logits. If ``needs_grad`` is False, the gradient may be None. If ``sums`` is
    True, return the sum [] of the losses in place of the losses. The default backend is the fastest that supports the
    arguments and passes its self-test. ``masses`` and ``parts`` hold the same tensors: Triton reads ``masses``, and all
    other backends read ``parts``.
    """
    backend = _backend(logits, k, tau, parts.has_labels_only)
    if backend == "numba":
        s = logits.to(torch.float32, memory_format=torch.contiguous_format)  # the gradient overwrites the copy
        cpu = load("topk_registry.ops.ksubset.cpu")
        return cpu.losses(s, parts, k, tau, alpha, sums=sums, out=None if s is logits else s)
    if backend == "triton":
        triton = load("topk_registry.ops.ksubset.triton.backend")
        losses, gradient = triton.losses(logits, masses, k, tau, alpha, needs_grad)
    else:
        losses, gradient = autograd.losses_and_gradient(logits, parts, k, tau, alpha, needs_grad)
    return losses.sum() if sums else losses, gradient


def _backend(logits: Tensor, k: int, tau: float, labels_only: bool) -> str:
    device = logits.device
    if logits.dtype == torch.float64 or 2 * k > logits.shape[1] or k * tau >= MAX_TEMPERATURE:
        return "torch"
    if device.type == "cpu" and k <= LARGEST_K["cpu"]:
        return choose(device, "numba", _labels_work if labels_only else _masses_work)
    if device.type == "cuda" and k <= LARGEST_K["cuda"]:
        return choose(device, "triton", _gpu_works)
    return "torch"


def usual_backend(device: torch.device) -> str:
    """Return "numba", "triton" or "torch": the backend for losses of float32 logits with one label per row."""
    return _backend(torch.empty(0, 100, device=device), 5, 0.1, True)


def _labels_work(device: torch.device) -> bool:
    return _works(device, has_even=False)


def _masses_work(device: torch.device) -> bool:
    return _works(device, has_even=True)


def _gpu_works(device: torch.device) -> bool:
    if not hasattr(load("topk_registry.ops.ksubset.triton.backend"), "losses"):
        return False
    return _works(device, has_even=False) and _works(device, has_even=True)


def _works(device: torch.device, has_even: bool) -> bool:
    even = torch.full((3,), 0.01) if has_even else None
    parts = Parts(torch.tensor([[0], [6], [12]]), torch.ones(3, 1), even, None)
    s = torch.linspace(0, 30, 39).sin().view(3, 13)
    alpha = torch.ones(())
    expected = autograd.losses_and_gradient(s.double(), parts, 2, 0.25, alpha, True)
    on_device = parts.to(device)
    if device.type == "cpu":
        found = load("topk_registry.ops.ksubset.cpu").losses(s, on_device, 2, 0.25, alpha)
    else:
        triton = load("topk_registry.ops.ksubset.triton.backend")
        found = triton.losses(s.to(device), on_device, 2, 0.25, alpha.to(device), True)
    return all(
        b is not None and torch.allclose(a.cpu().double(), b, rtol=1e-4, atol=1e-5)
        for a, b in zip(found, expected, strict=True)
    )


def topk_margins(logits: Tensor, k: int, *, temperature: float = 1.0) -> Tensor:
    """Return the margin of each class: its score minus the k-th largest score of the other classes, smoothed.

    The margin is temperature * log(p / (1 - p)), where p is the probability that :func:`topk_marginals` returns. As the
    temperature goes to 0, the margin becomes the score minus the k-th largest score of the other classes. If at most k
    scores of a row are above -inf, the classes with these scores have the margin inf, and all other classes have the
    margin -inf.

    Args:
        logits: scores [..., n]. A class with the score -inf is excluded.
        k: as in "k-th largest score", 1 <= k <= n - 1.
        temperature: positive number by which the scores are divided.

    Returns:
        Margins [..., n], in double precision for logits in double precision, else in single precision.

    Example:
        >>> topk_margins(torch.tensor([3.0, 2.0, 1.0]), 2, temperature=1e-6)
        tensor([ 2.0000,  1.0000, -1.0000])
    """
    return _of_all_classes(graph.margins, logits, k, temperature)


def topk_log_odds(logits: Tensor, k: int) -> Tensor:
    """For each class, return the log-odds that a random set of k classes contains the class.

    The probability of a set is proportional to the product of e_i = exp(x_i) over the set, where x are the logits. The
    log-odds log(p / (1 - p)) of class i are x_i + log sigma_{k-1}(e without e_i) - log sigma_k(e without e_i). Here
    sigma_j is the j-th elementary symmetric polynomial: the sum, over all sets of j numbers, of the product of the
    numbers. The results are exact up to rounding errors, and differentiable.

    Args:
        logits: scores [..., n]. A class with the score -inf is excluded.
        k: number of classes in a set, 1 <= k <= n - 1.

    Returns:
        Log-odds [..., n], in double precision for logits in double precision, else in single precision.

    Example:
        >>> topk_log_odds(torch.zeros(4), 1)
        tensor([-1.0986, -1.0986, -1.0986, -1.0986])

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    return topk_margins(logits, k)


def topk_marginals(logits: Tensor, k: int, *, temperature: float = 1.0) -> Tensor:
    """For each class, return the probability that a random set of k classes contains the class.

    The probability of a set is proportional to exp((sum of the scores of the set) / temperature). The probabilities of
    all classes of a row sum to k. For k = 1, the result is softmax(logits / temperature). If at most k scores of a row
    are above -inf, the classes with these scores have probability 1, and all other classes have probability 0.

    Args:
        logits: scores [..., n]. A class with the score -inf is excluded.
        k: number of classes in a set, 1 <= k <= n - 1.
        temperature: positive number by which the scores are divided.

    Returns:
        Probabilities [..., n], in double precision for logits in double precision, else in single precision.

    Example:
        >>> topk_marginals(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2).sum()
        tensor(2.0000)
    """
    return _of_all_classes(graph.marginals, logits, k, temperature)


def topk_label_margins(logits: Tensor, label: Tensor, k: int, *, temperature: float = 1.0) -> Tensor:
    """Return the margin of each row's label in double precision [B]. :func:`topk_margins` defines the margin.

    Args:
        logits: scores [B, n].
        label: class indices [B], int64.
        k, temperature: as in :func:`topk_margins`.
    """
    check(logits, k, temperature)
    if label.dtype != torch.int64 or label.shape != logits.shape[:1] or logits.ndim != 2:
        raise ValueError(
            f"expected logits [B, n] and int64 labels [B], got {list(logits.shape)} and {label.dtype} "
            f"{list(label.shape)}"
        )
    return topk_margins(logits.double(), k, temperature=temperature).gather(1, label[:, None])[:, 0]


def _of_all_classes(function: Callable[..., Tensor], logits: Tensor, k: int, temperature: float) -> Tensor:
    check(logits, k, temperature)
    n = logits.shape[-1]
    rows = logits.reshape(-1, n)
    rows = rows.to(autograd.working_dtype(rows, k, temperature))
    out = autograd.in_blocks(function, rows, k, max(float(temperature), autograd.LEAST_TEMPERATURE))
    return out.to(output_dtype(logits)).reshape(logits.shape)


def output_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def check(logits: Tensor, k: int, temperature: float) -> None:
    """Raise a ValueError if an argument is invalid.

    The logits must be a dense floating-point tensor [..., n]. k must be an integer from 1 to n - 1. The temperature
    must be positive and finite.
    """
    check_dense(logits, "logits")
    if not logits.is_floating_point() or logits.ndim < 1:
        raise ValueError(f"logits must be floating point [..., n], got {logits.dtype} {list(logits.shape)}")
    n = logits.shape[-1]
    if (type(k) is not int and (isinstance(k, bool) or not isinstance(k, Integral))) or not 1 <= k < n:
        raise ValueError(f"k must be an integer from 1 to n - 1 = {n - 1}, got {k!r}")
    number(temperature, "temperature", above=0)
