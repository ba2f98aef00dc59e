"""The one door to the k-subset operator: checks what comes in, chooses an implementation, and keeps its promises.

Implementations work on contiguous rows s [B, n] of single or double precision with 2k <= n: ``margins(s, k, theta)
-> [B, n]``, differentiable, and ``label_margins(s, label, k, theta) -> ([B], [B, n])``, which writes the gradient to
the scores along with the margin. Everything else (other shapes and dtypes, larger k, bad input) is settled here.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from numbers import Integral

import torch
from torch import Tensor

from topk_registry.ops.ksubset import autograd, torch_path

MARGINS = ("torch",)
LABEL_MARGINS = ("torch", "numba")
NUMBA_LARGEST_K = 256  # its tables of k^2 numbers a thread leave the cache beyond


def topk_margins(logits: Tensor, k: int, *, temperature: float = 1.0, impl: str = "auto") -> Tensor:
    """How far each class is inside the top-k set, in units of the scores: a smooth gap to the k-th best other class.

    margin_i = temperature * l_i(logits / temperature), with the log-odds l of :func:`topk_log_odds`. As the temperature
    goes to zero it becomes logits_i - (the k-th largest of the other logits), and it is finite for any temperature.

    Args:
        logits: scores [..., n]; -inf marks a class that cannot be chosen.
        k: size of the set, 1 <= k <= n - 1.
        temperature: a positive number.
        impl: ``"auto"``, or the name of an implementation.

    Returns:
        Margins [..., n], in single precision for half-precision logits, else in the dtype of the logits.

    Example:
        >>> topk_margins(torch.tensor([3.0, 2.0, 1.0]), 2, temperature=1e-6)
        tensor([ 2.0000,  1.0000, -1.0000])
    """
    return _margins(logits, k, temperature, impl).to(_dtype(logits))


def topk_log_odds(logits: Tensor, k: int, *, impl: str = "auto") -> Tensor:
    """Log-odds of each class being in a random k-set that is drawn with probability proportional to prod exp(logits).

    l_i = x_i + log sigma_{k-1}(e without i) - log sigma_k(e without i), e = exp(x), with sigma_j the j-th elementary
    symmetric polynomial. Exact to rounding, differentiable for any cotangent; arguments as :func:`topk_margins`.

    Example:
        >>> topk_log_odds(torch.zeros(4), 1)
        tensor([-1.0986, -1.0986, -1.0986, -1.0986])

    Reference: Berrada, Zisserman, Kumar, *Smooth Loss Functions for Deep Top-k Classification*, ICLR 2018.
    """
    return topk_margins(logits, k, impl=impl)


def topk_marginals(logits: Tensor, k: int, *, temperature: float = 1.0, impl: str = "auto") -> Tensor:
    """Probability of each class to be in the top-k set: sigmoid of the log-odds of ``logits / temperature``.

    pi_i = e_i sigma_{k-1}(e without i) / sigma_k(e); they sum to k. For k = 1 this is softmax. Arguments as
    :func:`topk_margins`.

    Example:
        >>> topk_marginals(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2).sum()
        tensor(2.0000)
    """
    return torch.sigmoid(_margins(logits, k, temperature, impl) / temperature).to(_dtype(logits))


def topk_label_margins(
    logits: Tensor, label: Tensor, k: int, *, temperature: float = 1.0, impl: str = "auto"
) -> Tensor:
    """The entry of :func:`topk_margins` at each row's label, with a backward pass that costs one multiplication.

    Args:
        logits: scores [B, n].
        label: class indices [B], int64.
        k, temperature, impl: as in :func:`topk_margins`.

    Returns:
        Margins [B] in double precision.
    """
    _check(logits, k, temperature)
    _check_impl(impl, LABEL_MARGINS)
    if label.dtype != torch.int64 or label.shape != logits.shape[:1] or logits.ndim != 2:
        raise ValueError(
            f"expected logits [B, n] and int64 labels [B], got {list(logits.shape)} and {label.dtype} "
            f"{list(label.shape)}"
        )
    if label.numel() and _may_look(logits):
        low, high = label.aminmax()
        if low < 0 or high >= logits.shape[1]:
            wrong = int(low) if low < 0 else int(high)
            raise ValueError(f"label must be in [0, {logits.shape[1] - 1}], got {wrong}")
    s, k, theta, sign = _prepare(logits, k, temperature)
    margin, _ = autograd.LabelMargins.apply(s, label, k, theta, _label_kernel(impl, s, k))
    if _may_look(logits) and not bool(margin.detach().isfinite().all()):  # what too few scores come to
        _check_finite(logits.detach(), k)
    return sign * margin


def _margins(logits: Tensor, k: int, temperature: float, impl: str) -> Tensor:
    """In the precision they are computed in: where that is double, they may be beyond the range of single."""
    _check(logits, k, temperature)
    _check_impl(impl, MARGINS)
    if _may_look(logits):
        _check_finite(logits.detach(), k)
    s, k, theta, sign = _prepare(logits, k, temperature)
    rows = autograd.margins(s, k, theta)
    return (rows if sign > 0 else -rows).view(logits.shape)


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _prepare(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, int, float, int]:
    """Rows to work on, with 2k <= n: drawing k classes by x is leaving out n - k by -x, so the log-odds change sign."""
    n = logits.shape[-1]
    sign = 1 if 2 * k <= n else -1
    k = int(k if sign > 0 else n - k)
    # coefficients span e^k and margins grow with the temperature: both can be more than single precision holds
    double = logits.dtype == torch.float64 or k > 64 or temperature > 1e30
    s = logits.to(torch.float64 if double else torch.float32).reshape(-1, n)
    # below this the margins no longer depend on the temperature, but its reciprocal would overflow
    theta = max(float(temperature), 4 * torch.finfo(s.dtype).tiny)
    return (s if sign > 0 else -s).contiguous(), k, theta, sign


def _label_kernel(impl: str, s: Tensor, k: int) -> Callable:
    if impl == "auto":
        fits = s.device.type == "cpu" and k <= NUMBA_LARGEST_K and not torch.compiler.is_compiling()
        return (_numba_kernel() if fits else None) or torch_path.label_margins
    if impl == "torch":
        return torch_path.label_margins
    if s.device.type != "cpu" or k > NUMBA_LARGEST_K:
        raise ValueError(f"impl 'numba' is for the CPU and k or n - k up to {NUMBA_LARGEST_K}: {s.device}, {k}")
    from topk_registry.ops.ksubset import cpu

    return cpu.label_margins


@lru_cache(maxsize=1)
def _numba_kernel() -> Callable | None:
    """The compiled kernel where numba is installed; one that does not work is told of once, and done without."""
    if find_spec("numba") is None:
        return None
    try:
        from topk_registry.ops.ksubset import cpu
    except Exception as error:
        warnings.warn(f"numba is installed but cannot be used, the losses are slower: {error!r}", stacklevel=2)
        return None
    return cpu.label_margins


def _check_impl(impl: str, available: tuple[str, ...]) -> None:
    if impl not in ("auto", *available):
        raise ValueError(f"impl must be 'auto' or one of {', '.join(map(repr, available))}, got {impl!r}")


def _check(logits: Tensor, k: int, temperature: float) -> None:
    if not logits.is_floating_point() or logits.ndim < 1:
        raise ValueError(f"logits must be floating point [..., n], got {logits.dtype} {list(logits.shape)}")
    n = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k < n:
        raise ValueError(f"k must be an integer from 1 to n - 1 = {n - 1}, got {k!r}")
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature!r}")


def _may_look(logits: Tensor) -> bool:
    """Values are looked at on the CPU only: elsewhere that would stall the device, in a compiled graph break it."""
    return logits.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_finite(logits: Tensor, k: int) -> None:
    """A row with too few scores is an error where it is seen, and NaN elsewhere."""
    if not logits.numel() or bool(logits.amin() > -torch.inf):
        return
    scores = (logits != -torch.inf).sum(-1)
    if bool((scores <= k).any()):
        raise ValueError(f"every row needs at least k + 1 = {k + 1} scores above -inf, one has {int(scores.min())}")
