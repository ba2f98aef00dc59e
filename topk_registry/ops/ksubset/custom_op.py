"""The smooth top-k loss as a custom operator of torch, which is one node in compiled and exported graphs."""

import torch
from torch import Tensor

from topk_registry.ops.fused import by_definition
from topk_registry.ops.ksubset.autograd import losses_of
from topk_registry.ops.parts import Parts


@torch.library.custom_op("topk_registry::smooth_topk", mutates_args=())
def smooth_topk(
    logits: Tensor, labels: Tensor | None, shares: Tensor | None, even: Tensor | None, dense: Tensor | None,
    alpha: Tensor, k: int, tau: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the losses [B] of :func:`api.smooth_topk` and their gradient [B, n].

    ``labels``, ``shares``, ``even`` and ``dense`` define the weight of each class in the target of each row, as in
    :class:`Parts`. The backend is chosen when the graph runs.
    """
    from topk_registry.ops.ksubset.api import run  # circular import

    parts = Parts(labels, shares, even, dense)
    losses, gradient = run(logits, True, masses=parts, parts=parts, k=k, tau=tau, alpha=alpha, sums=False)
    assert gradient is not None
    return losses, gradient.to(torch.promote_types(logits.dtype, torch.float32))


@smooth_topk.register_fake
def _(logits, labels, shares, even, dense, alpha, k, tau):
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(logits.shape[0], dtype=dtype), logits.new_empty(logits.shape, dtype=dtype)


def _setup_context(ctx, inputs, output) -> None:
    logits, *parts, ctx.k, ctx.tau = inputs
    ctx.save_for_backward(logits, *parts, output[1])


def _backward(ctx, g: Tensor, _):
    logits, *parts, alpha, gradient = ctx.saved_tensors
    if torch.is_grad_enabled():
        ds = by_definition(lambda s: losses_of(s, Parts(*parts), ctx.k, ctx.tau, alpha), logits, g)
    else:
        ds = (gradient * g[:, None]).to(logits.dtype)
    return ds, None, None, None, None, None, None, None


smooth_topk.register_autograd(_backward, setup_context=_setup_context)
