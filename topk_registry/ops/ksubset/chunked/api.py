"""A linear classifier and the k-subset operator in one: the logits never exist as a whole."""

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from topk_registry.ops.constant import fixed_number
from topk_registry.ops.ksubset.api import topk_marginals
from topk_registry.ops.ksubset.chunked.custom_ops import LinearLabelMargins
from topk_registry.ops.ksubset.chunked.layer import as_rows, check_scores, kernels, score_chunks
from topk_registry.ops.ksubset.request import check, output_dtype
from topk_registry.ops.ksubset.torch.state import State, merge, top_margins
from topk_registry.ops.targets.checks import check_device, check_range

CPU_CHUNK = 1 << 20  # scores in a chunk: few enough to stay in the cache
GPU_BYTES = 1 << 28  # enough for a chunk's launches to take less time than its work
LEAST_CHUNK = 1024  # classes: below this the products of matrices are slow


def linear_label_margins(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    label: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """``topk_label_margins(F.linear(features, weight, bias), label, k)`` in the memory of a chunk of the logits.

    Args:
        features: [B, d].
        weight: [n, d], a row a class.
        bias: [n] or None.
        label: class indices [B], int64.
        k, temperature: as in :func:`topk_margins`.
        chunk: number of classes at a time; None chooses for speed.

    Returns:
        Margins [B] in double precision, differentiable once to features, weight and bias. Under autocast matrices are
        multiplied in half precision, as by ``F.linear``, and everything else is done in single.

    Example:
        >>> features, weight = torch.randn(8, 64), torch.randn(1000, 64)
        >>> linear_label_margins(features, weight, None, torch.arange(8), 5).shape
        torch.Size([8])
    """
    like = logits_like(features, weight, bias)
    check(like, k, temperature)
    if label.dtype != torch.int64 or label.shape != features.shape[:1]:
        raise ValueError(f"label must be int64 {list(features.shape[:1])}, got {label.dtype} {list(label.shape)}")
    check_device(features, "label", label)
    # elsewhere a look would stall the device, or break the graph
    looked_at = features.device.type == "cpu" and not torch.compiler.is_compiling()
    if looked_at:
        check_range(label, len(weight), name="label")
    options = int(k), float(fixed_number(temperature)), chunk_size(features, k, chunk), product_dtype(features)
    margin, top, _, _ = LinearLabelMargins.apply(features, weight, bias, label, *options)
    if looked_at:
        _, inner_k, _, sign = as_rows(features, len(weight), k, temperature)
        check_scores(margin.detach(), top.detach()[:, inner_k - 1], k, sign)
    return margin


class TopClasses(NamedTuple):
    """The k classes of the largest scores, largest first, and what is known of them."""

    indices: Tensor  # [B, k]
    logits: Tensor  # [B, k]
    marginals: Tensor  # [B, k], probability of being in the top-k set


@torch.no_grad()
def linear_topk(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> TopClasses:
    """The k largest of ``F.linear(features, weight, bias)`` with their ``topk_marginals``, in the memory of a chunk.

    Not differentiable. Arguments as :func:`linear_label_margins`.

    Example:
        >>> linear_topk(torch.eye(3), torch.eye(3), None, 1).marginals.T
        tensor([[0.5761, 0.5761, 0.5761]])
    """
    like = logits_like(features, weight, bias)
    check(like, k, temperature)
    k, chunk, x = int(k), chunk_size(features, k, chunk), features.to(product_dtype(features))
    like, _, theta, sign = as_rows(features, len(weight), k, temperature)
    with torch.autocast(features.device.type, enabled=False):
        if sign < 0 or len(weight) <= max(chunk, 2 * k + 2):  # the top group would be all classes
            logits = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
            marginals = topk_marginals(logits, k, temperature=temperature)
            top, indices = logits.topk(k)
            return TopClasses(indices, top, marginals.gather(1, indices))
        state: State | None = None
        for first, _, _, s in score_chunks(x, weight, bias, chunk, like):
            part = kernels(like, k + 1).summarise(s, k + 1, theta, first, out=s)
            state = part if state is None else merge(state, part, theta)
    assert state is not None
    marginals = torch.sigmoid(top_margins(state, theta) / theta).to(output_dtype(x))
    return TopClasses(state.classes[:, :k], state.top[:, :k].to(x.dtype), marginals)


def logits_like(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """No rows [0, n] of the logits' dtype, to look up what that asks for; raises where no logits could be made."""
    given = [t for t in (features, weight, bias) if t is not None]
    shapes = [list(t.shape) for t in given]
    if (
        features.ndim != 2
        or weight.ndim != 2
        or shapes[0][1:] != shapes[1][1:]
        or shapes[2:] not in ([], [shapes[1][:1]])
    ):
        raise ValueError(f"expected features [B, d], weight [n, d] and bias [n] or None, got {shapes}")
    dtypes = {product_dtype(t) for t in given}
    if features.dtype in (torch.float32, torch.float64):
        dtypes.discard(torch.bfloat16)  # a weight that is kept so is multiplied in the precision of the features
    if len(dtypes) > 1 or not features.is_floating_point():
        raise ValueError(
            "features, weight and bias must be floating point, and of one dtype outside autocast, "
            f"got {[t.dtype for t in given]}; only a bfloat16 weight may stand beside others"
        )
    return features.new_empty(0, len(weight))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that F.linear would multiply in: autocast leaves double precision alone."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def chunk_size(features: Tensor, k: int, chunk: int | None) -> int:
    """Return the number of classes in a chunk."""
    if chunk is None:
        on_cpu = features.device.type == "cpu"
        scores = CPU_CHUNK if on_cpu else GPU_BYTES // product_dtype(features).itemsize
        return max(scores // max(len(features), 1), LEAST_CHUNK, 8 * int(k))
    if isinstance(chunk, bool) or not isinstance(chunk, Integral) or chunk < 1:
        raise ValueError(f"chunk must be a number of classes of at least 1, got {chunk!r}")
    return int(chunk)
